"""Actor: the policy, which trains in one layout and generates in another.

Source: HybridFlow (arXiv:2409.19256), Table 4 of the appendix (model classes and their methods).
"""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from jaxrlhf.algos.objectives import TokenOutput
from jaxrlhf.batch import Array, Params, RolloutBatch, Sequences
from jaxrlhf.batching.ragged import Experience
from jaxrlhf.batching.transfer_protocol import ONE_TO_ALL, THREE_D_PROTO, worker_method
from jaxrlhf.config import Optimizer
from jaxrlhf.resharding.hybrid import HybridEngine, SwitchError
from jaxrlhf.resharding.offload import Moved
from jaxrlhf.resharding.transfer import Exchange, Offer, Splits
from jaxrlhf.workers.generation.generates import GenerationWorker
from jaxrlhf.workers.model import Metrics, ModelSetup
from jaxrlhf.workers.sampler import Sampler
from jaxrlhf.workers.trained_model import Objective, TrainedWorker, Updated


class Actor(TrainedWorker, GenerationWorker):
    """Worker of the policy: training, log-probabilities and (without a rollout pool) generation.

    Args:
      sampler: Sampler of the policy; None if another pool generates.
      hybrid: Engine that switches the weights between the training and generation layouts; None if another pool
        generates.
      exchange: This process's end of weight transfers between pools.

    Attributes:
      version: Number of steps that have updated the weights.
    """

    replays_routing = keeps_sampled = True

    def __init__(
        self,
        setup: ModelSetup,
        params: Params,
        *,
        optimizer: Optimizer,
        total_updates: int,
        adapters: Params | None,
        sampler: Sampler | None,
        hybrid: HybridEngine | None,
        exchange: Exchange,
    ) -> None:
        super().__init__(setup, params, optimizer=optimizer, total_updates=total_updates, adapters=adapters)
        self._sampler, self._hybrid, self._exchange = sampler, hybrid, exchange
        self.version = 0
        self._switches: list[Moved] = []

    def counters(self) -> dict[str, int]:
        return {**super().counters(), "version": self.version}

    def set_counters(self, counters: Mapping[str, int]) -> None:
        super().set_counters(counters)
        self.version = counters["version"]

    def take_metrics(self) -> Metrics:
        """Return the cost of switching layouts and of moving weights since the last call, and the worth of drafts."""
        switches, self._switches = self._switches, []
        drafts = {} if self._sampler is None else self._sampler.take_metrics()
        return super().take_metrics() | {
            **drafts,
            "time/relayout_s": sum(switch.seconds for switch in switches),
            "relayout/received_bytes": float(max((switch.bytes_per_device for switch in switches), default=0)),
        }

    @contextmanager
    def generating(self, versions: Sequence[int] = ()) -> Iterator[Sampler]:
        """Load the current weights into the sampler's engine within the block, and yield the sampler."""
        sampler = self._sampler
        assert sampler is not None and self._hybrid is not None, "another pool generates for this actor"
        if not self.has_devices:
            yield self._described_sampler(sampler, self._hybrid)
            return
        with self.parameters.on_devices():
            try:
                weights = self._switched(self._hybrid.to_generation(self._weights))
            except SwitchError as error:
                self._weights, _ = self._hybrid.to_training(error.weights, self._weights)
                raise
            try:
                # Master weights that have a cast copy are moved to host memory meanwhile.
                with self.parameters.partly_away(self._hybrid.masters["parameters"]):
                    sampler.load(weights, self.version, donated=self._hybrid.donated)
                    yield sampler
            finally:
                sampler.engine.unload()
                self._weights = self._switched(self._hybrid.to_training(weights, self._weights))

    def _described_sampler(self, sampler: Sampler, hybrid: HybridEngine) -> Sampler:
        """Lower the programs of the layout switch, load described weights, and return the sampler."""
        for way, programs in hybrid.lower()._asdict().items():
            self.lowered |= {f"{way}[{index}]": program for index, program in enumerate(programs)}
        sampler.load(hybrid.generation_shapes, self.version, donated=hybrid.donated)
        return sampler

    @property
    def _weights(self) -> dict[str, Params]:
        """Weights to switch to the generation layout: the parameters, and the adapters if there are any."""
        adapters = {} if self.adapters is None else {"adapters": self.adapters.tree}
        return {"parameters": self.parameters.tree, **adapters}

    @_weights.setter
    def _weights(self, weights: dict[str, Params]) -> None:
        self.parameters.tree = weights["parameters"]
        if self.adapters is not None:
            self.adapters.tree = weights["adapters"]

    def _switched(self, switched: tuple[Any, Moved]) -> Any:
        weights, switch = switched
        self._switches.append(switch)
        return weights

    @worker_method(ONE_TO_ALL, part="relayout")
    def offer_weights(self, wanted: Sequence[Splits], *, waiting: int = 0) -> tuple[int, Offer]:
        """Offer the weights in the splits that the generating ranks want, for them to take.

        Args:
          waiting: Maximum number of offers, each a copy, that may wait while updates continue; 0 if an offer is taken
            before the next update.
        """
        with self.parameters.on_devices():
            # An update, or a move back to the host, would delete uncopied weights before they are taken.
            keep = "parameters" not in self.setup.offload and not waiting
            paths = [grid.path for grid in wanted[0].grids]
            offered = {part: tree for part, tree in self._weights.items() if any(part in path for path in paths)}
            return self.version, self._exchange.offer(offered, wanted[0], keep=keep, waiting=max(waiting, 1))

    @worker_method(ONE_TO_ALL, part="relayout")
    def withdraw_weights(self, wanted: Sequence[Splits]) -> None:
        """Withdraw weights that were offered to ranks that no longer exist."""
        self._exchange.withdraw(wanted[0])

    @worker_method(THREE_D_PROTO)
    def compute_log_prob(self, rollout: RolloutBatch | Sequences, *, temperature: float | None = None) -> Array:
        """Return log pi of every response token under the current policy. `temperature=None` takes the rollout's.

        Raises:
          RuntimeError: A rollout's tokens were sampled by a policy outside the run's staleness, or by no policy.
            `Sequences` have no version and are not checked.
        """
        if isinstance(rollout, RolloutBatch):
            sampled_by = {*np.unique(np.asarray(rollout.version_BT)[np.asarray(rollout.sequences.mask_BT)]).tolist()}
            if -1 in sampled_by:
                raise RuntimeError(
                    "the rollout's mask_BT includes tokens with version_BT=-1, which no policy sampled; a `collect` "
                    "that joins rollouts must also join their version_BT"
                )
            if stale := sampled_by - {*range(self.version - self.setup.staleness, self.version + 1)}:
                raise RuntimeError(
                    f"the policy is version {self.version}, but the rollout holds responses of versions "
                    f"{sorted(stale)}; compute old log-probabilities before the update, or raise rollout.staleness"
                )
        return self.log_prob(rollout, temperature=temperature)

    @worker_method(THREE_D_PROTO)
    def compute_entropy(self, rollout: RolloutBatch) -> Array:
        """Return the entropy of the current policy's distribution at every response token, `[B, T]`."""
        output: TokenOutput = self.forward(rollout.sequences, temperature=self.setup.temperature, wanted="entropy")
        assert output.entropy is not None
        return output.entropy

    @worker_method(THREE_D_PROTO, part="update")
    def update_actor(
        self,
        minibatches: Sequence[Experience],
        *,
        objective: Objective,
        settings: Hashable,
        temperature: float | None = None,
    ) -> Metrics:
        """Update the policy once per minibatch. `temperature=None` takes the rollout's temperature."""
        scale = self.setup.temperature if temperature is None else temperature
        return self._updated(self.update(minibatches, objective, settings, temperature=scale))

    def _updated(self, updated: Updated) -> Metrics:
        """Count a new version of the policy, and return the metrics of its update."""
        self.version += 1
        metrics, first = updated
        # At the first minibatch the policy is unchanged: a KL other than 0 is numerics or a bug.
        return metrics | {"policy/kl_old_first": first["policy/kl_old"]} if "policy/kl_old" in first else metrics
