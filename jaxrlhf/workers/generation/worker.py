"""Worker of the rollout role: generation on another pool than the actor's, with copies of the actor's weights."""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax

from jaxrlhf.batch import Params
from jaxrlhf.batching.transfer_protocol import ONE_TO_ALL, RankCoordinates, worker_method
from jaxrlhf.resharding.offload import to_device
from jaxrlhf.resharding.transfer import Exchange, Offer, Splits, splits_of
from jaxrlhf.workers.generation.generates import GenerationWorker
from jaxrlhf.workers.model import Metrics
from jaxrlhf.workers.sampler import Sampler


class RolloutWorker(GenerationWorker):
    """Worker of the rollout role: an engine on another pool, which receives the actor's weights.

    Newer weights may be fetched to host memory while the engine samples with the current weights.

    Args:
      layout: Shardings of the received weights over the sampler's whole mesh; like `shapes`, a dict of trees by part.
      quantize: Function that quantizes received parameters for the engine, and deletes what it replaces.
    """

    def __init__(
        self,
        sampler: Sampler,
        layout: Any,
        shapes: Any,
        exchange: Exchange,
        quantize: Callable[[Params], Params],
    ) -> None:
        self.place = RankCoordinates.of(sampler.mesh)
        self._sampler, self._layout, self._shapes, self._exchange = sampler, layout, shapes, exchange
        self._trained = ["adapters" if "adapters" in layout else "parameters"]
        self._quantize = quantize
        self._weights: dict[str, Any] = {}
        self._fetched: dict[int, tuple[int, Any]] = {}
        self._version = -1
        self._metrics: Metrics = {}

    def take_metrics(self) -> Metrics:
        """Return the cost of receiving and loading weights since the last call, and the worth of drafts."""
        metrics, self._metrics = self._metrics, {}
        return metrics | self._sampler.take_metrics()

    @worker_method(ONE_TO_ALL, part="relayout")
    def wanted_weights(self) -> Splits:
        """Return the splits of every weight that the actor has to send."""
        return splits_of(*({part: tree[part] for part in self._missing()} for tree in (self._layout, self._shapes)))

    def _missing(self) -> list[str]:
        """Return the parts of the weights to be sent: the trained part, and the first time the frozen parts too."""
        return [part for part in self._layout if part in self._trained or part not in self._weights]

    @worker_method(ONE_TO_ALL, part="relayout")
    def load_weights(self, offers: Sequence[tuple[int, Offer]]) -> int:
        """Receive the weights that the ranks of the actor offer, load them, and return their version."""
        missing = self._missing()
        self._let_go(missing)
        [version] = {version for version, _ in offers}
        layout = {part: self._layout[part] for part in missing}
        taken, delivery = self._exchange.take([offer for _, offer in offers], layout)
        self._metrics["transfer/received_bytes"] = float(delivery.bytes_per_device)
        self._metrics["transfer/seconds"] = delivery.seconds
        return self._load(taken, version)

    @worker_method(ONE_TO_ALL, part="fetch")
    def fetch_weights(self, offers: Sequence[tuple[int, Offer]], *, number: int) -> int:
        """Fetch offered weights to host memory under a number, until they are loaded; return the number.

        Other calls may run meanwhile. The frozen parts of the weights are on the devices already.
        """
        [version] = {version for version, _ in offers}
        layout = {part: self._layout[part] for part in self._trained}
        fetched, delivery = self._exchange.fetch([offer for _, offer in offers], layout)
        self._fetched[number] = version, fetched
        self._metrics["transfer/received_bytes"] = float(delivery.bytes_per_device)
        return number

    @worker_method(ONE_TO_ALL, part="relayout")
    def load_fetched(self, numbers: Sequence[int]) -> int:
        """Move the weights fetched under a number to the devices, load them, and return their version.

        Args:
          numbers: The number, once for each rank.
        """
        [number] = {*numbers}
        version, fetched = self._fetched.pop(number)
        self._let_go(self._trained)
        weights, moved = to_device(fetched)
        self._metrics["transfer/seconds"] = moved.seconds
        return self._load(weights, version)

    def _let_go(self, parts: Collection[str]) -> None:
        """Free parts of the weights on the devices."""
        self._sampler.engine.unload()
        for part in parts:
            jax.tree.map(lambda leaf: leaf.delete(), self._weights.pop(part, {}))

    def _load(self, weights: dict[str, Any], version: int) -> int:
        if "parameters" in weights:
            weights |= {"parameters": self._quantize(weights["parameters"])}
        self._weights |= weights
        self._version = version
        self._sampler.load(self._weights, version, donated=jax.tree.map(lambda _: True, self._weights))
        return version

    @contextmanager
    def generating(self, versions: Sequence[int] = ()) -> Iterator[Sampler]:
        """Yield the sampler; the engine frees its cache by itself, and the weights stay."""
        assert set(versions) == {self._version}, (
            f"the pool holds weights of version {self._version}, expected {sorted(set(versions))}"
        )
        yield self._sampler
