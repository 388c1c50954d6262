"""The roles of the paper as workers: actor, critic, reference and reward.

Source: HybridFlow (arXiv:2409.19256), Table 4 of the appendix (model classes and their verbs).
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from typing import Any

import jax
import numpy as np

from jaxrlhf.algos.objectives import TokenOutput
from jaxrlhf.batch import Array, Experience, Params, Problem, Rollout, Scores, Sequences
from jaxrlhf.batching.packing import Rows
from jaxrlhf.batching.transfer_protocol import DP_PROTO, ONE_TO_ALL, THREE_D_ALL_MICRO_DP, THREE_D_PROTO, Place, verb
from jaxrlhf.config import CRITICS, ROLLOUT, Sampling
from jaxrlhf.engine import Completion
from jaxrlhf.models.heads import CHUNK_TOKENS, token_logp, values
from jaxrlhf.resharding.hybrid import HybridEngine, Switch, SwitchError
from jaxrlhf.resharding.offload import to_device, to_host
from jaxrlhf.resharding.transfer import Exchange, Offer, Splits
from jaxrlhf.rewards.scorer import Scorer
from jaxrlhf.workers.model import Metrics, ModelWorker, Progress
from jaxrlhf.workers.sampler import Generator, Listener, Sampler
from jaxrlhf.workers.trained import Objective, TrainedWorker


def _policy_output(
    worker: ModelWorker, params: Params, hidden_RWD: Array, rows: Rows, temperature: Array, *, entropy: bool = False
) -> TokenOutput:
    return token_logp(
        params,
        worker.config,
        hidden_RWD,
        rows.token_RW,
        rows.mask_RW,
        temperature=temperature,
        entropy=entropy,
        chunk_tokens=CHUNK_TOKENS * worker.replicas.row_shards,
    )


class Actor(TrainedWorker):
    """The policy: trains in one layout, generates in the other.

    Args:
      sampler: Generates; None where a pool apart does.
      hybrid: Switches the weights to the generation layout and back; None likewise.
      exchange: Offers the weights to a pool apart.
      temperature: Of the rollout; the trained log-probabilities are at this temperature.
    """

    _replays = True

    def __init__(
        self,
        *args: Any,
        sampler: Sampler | None,
        hybrid: HybridEngine | None,
        exchange: Exchange,
        temperature: float,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._sampler, self._hybrid, self._exchange = sampler, hybrid, exchange
        self._temperature = temperature
        self.version = 0
        self._switches: list[Switch] = []

    def counters(self) -> dict[str, int]:
        return {**super().counters(), "version": self.version}

    def set_counters(self, counters: Mapping[str, int]) -> None:
        super().set_counters(counters)
        self.version = counters["version"]

    def take_metrics(self) -> Metrics:
        """What switching layouts cost since the last call."""
        switches, self._switches = self._switches, []
        return super().take_metrics() | {
            "time/relayout_s": sum(switch.seconds for switch in switches),
            "relayout/received_bytes": float(max((switch.bytes_per_device for switch in switches), default=0)),
        }

    def _read(
        self, params: Params, hidden_RWD: Array, rows: Rows, temperature: Array, *, entropy: bool = False
    ) -> TokenOutput:
        return _policy_output(self, params, hidden_RWD, rows, temperature, entropy=entropy)

    @contextmanager
    def _generating(self) -> Iterator[Sampler]:
        """The current weights are in the engine within the block."""
        assert self._sampler is not None and self._hybrid is not None, "another pool generates for this actor"
        with self.on_devices("parameters"):
            try:
                weights = self._switch(self._hybrid.to_generation(self._weights))
            except SwitchError as error:
                back, _ = self._hybrid.to_training(error.weights, self._weights)
                self._parts.update(back)
                raise
            try:
                with self._masters_away(self._hybrid):
                    self._sampler.load(weights, self.version, spent=self._hybrid.masters)
                    yield self._sampler
            finally:
                self._sampler.engine.unload()
                self._parts.update(self._switch(self._hybrid.to_training(weights, self._weights)))

    @property
    def _weights(self) -> dict[str, Params]:
        """What is switched to generate: the parameters, and where they have adapters, those."""
        return {part: self._parts[part] for part in ("parameters", "adapters") if part in self._parts}

    @contextmanager
    def _masters_away(self, hybrid: HybridEngine) -> Iterator[None]:
        """Within the block, masters beside cast copies wait in host memory, where parameters are offloaded."""
        if "parameters" not in self._offload:
            yield
            return
        params = self._parts["parameters"]
        masters = jax.tree.map(lambda leaf, waits: leaf if waits else None, params, hybrid.masters["parameters"])
        waiting, moved = to_host(masters)
        self._moves.append(moved)
        self._parts["parameters"] = jax.tree.map(
            lambda leaf, master: leaf if master is None else master, params, waiting
        )
        try:
            yield
        finally:
            self._move("parameters", to_device)

    def _switch(self, switched: tuple[Any, Switch]) -> Any:
        self._switches.append(switched[1])
        return switched[0]

    @verb(ONE_TO_ALL)
    def compile_generation(self, prompt_lengths: Sequence[int]) -> None:
        """Compile what generating from prompts of these lengths needs, so that no later step has to."""
        with self._generating() as sampler:
            sampler.engine.compile_ahead(prompt_lengths)

    @verb(THREE_D_ALL_MICRO_DP)
    def generate_sequences(
        self, problems: Sequence[Problem], sampling: Sampling, *, responses_per_prompt: int, seed: int
    ) -> Rollout:
        """Sample responses, prompt-major, under the current policy.

        Args:
          seed: With a problem's id and the number of the copy it determines a response.
        """
        with self._generating() as sampler:
            return sampler.generate(problems, sampling, responses_per_prompt=responses_per_prompt, seed=seed)

    @verb(ONE_TO_ALL)
    def offer_weights(self, wanted: Sequence[Splits]) -> tuple[int, Offer]:
        """Have the weights ready as the ranks that generate want them; they come and take them."""
        with self.on_devices("parameters"):
            # What is sent back to the host after this would be gone before it is taken.
            keep = "parameters" not in self._offload
            paths = [grid.path for grid in wanted[0].grids]
            asked = {part: self._weights[part] for part in self._weights if any(part in path for path in paths)}
            return self.version, self._exchange.offer(asked, wanted[0], keep=keep)

    @verb(THREE_D_PROTO)
    def compute_log_prob(self, rollout: Rollout | Sequences, *, temperature: float | None = None) -> Array:
        """log pi of every chosen token under the current policy. `temperature=None` is the rollout's.

        Sequences that no policy sampled are taken as they are.
        """
        if isinstance(rollout, Rollout) and (stale := set(np.unique(rollout.version_B).tolist()) - {self.version}):
            raise RuntimeError(
                f"the policy is version {self.version} and the rollout holds responses of {sorted(stale)}; "
                f"old log-probabilities have to be taken before the update"
            )
        scale = self._temperature if temperature is None else temperature
        return self._forward_all(sequences_of(rollout), temperature=scale).logp

    def frozen_log_prob(self, sequences: Sequences, adapters: Params, *, temperature: float | None) -> Array:
        """log pi of every chosen token under the frozen weights with these adapters."""
        scale = self._temperature if temperature is None else temperature
        return self._forward_all(sequences, temperature=scale, adapters=adapters).logp

    @verb(THREE_D_PROTO)
    def update_actor(
        self,
        minibatches: Sequence[Experience],
        *,
        objective: Objective,
        settings: Hashable,
        temperature: float | None = None,
    ) -> Metrics:
        """One update per minibatch. `temperature=None` is the rollout's."""
        scale = self._temperature if temperature is None else temperature
        metrics, first = self.update(minibatches, objective, settings, temperature=scale)
        self.version += len(minibatches)
        # At the first minibatch nothing has moved yet: what is not 0 here is numerics, or a bug.
        return metrics | {"policy/kl_old_first": first["policy/kl_old"]} if "policy/kl_old" in first else metrics


class Critic(TrainedWorker):
    """Estimates the value of every prefix."""

    def _read(
        self, params: Params, hidden_RWD: Array, rows: Rows, temperature: Array, *, entropy: bool = False
    ) -> Array:
        assert not entropy, "values have no distribution"
        return values(params, hidden_RWD)

    @verb(THREE_D_PROTO)
    def compute_values(self, rollout: Rollout | Sequences) -> np.ndarray:
        """`value_BT`: of the prefix before each token."""
        return self._forward_all(sequences_of(rollout))

    @verb(THREE_D_PROTO)
    def update_critic(self, minibatches: Sequence[Experience], *, objective: Objective, settings: Hashable) -> Metrics:
        """One update per minibatch."""
        return self.update(minibatches, objective, settings).metrics


class ProcessReward(TrainedWorker):
    """A language model whose log-ratio to the reference is the reward of each token.

    Args:
      temperature: Of the rollout; the log-probabilities of every role are at this temperature.
    """

    def __init__(self, *args: Any, temperature: float, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._temperature = temperature

    def _read(
        self, params: Params, hidden_RWD: Array, rows: Rows, temperature: Array, *, entropy: bool = False
    ) -> TokenOutput:
        return _policy_output(self, params, hidden_RWD, rows, temperature, entropy=entropy)

    @verb(THREE_D_PROTO)
    def compute_log_prob(self, rollout: Rollout) -> Array:
        """log pi of every chosen token under the process reward model."""
        return self._forward_all(rollout.sequences, temperature=self._temperature).logp

    @verb(THREE_D_PROTO)
    def update_process_reward(
        self, minibatches: Sequence[Experience], *, objective: Objective, settings: Hashable
    ) -> Metrics:
        """One update per minibatch."""
        return self.update(minibatches, objective, settings, temperature=self._temperature).metrics


class Reference(ModelWorker):
    """The frozen policy that the actor is kept close to."""

    def __init__(self, *args: Any, temperature: float, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._temperature = temperature

    def _read(
        self, params: Params, hidden_RWD: Array, rows: Rows, temperature: Array, *, entropy: bool = False
    ) -> TokenOutput:
        return _policy_output(self, params, hidden_RWD, rows, temperature, entropy=entropy)

    @verb(THREE_D_PROTO)
    def compute_ref_log_prob(self, rollout: Rollout | Sequences, *, temperature: float | None = None) -> Array:
        """log pi_ref of every chosen token. `temperature=None` is the rollout's."""
        scale = self._temperature if temperature is None else temperature
        return self._forward_all(sequences_of(rollout), temperature=scale).logp


class FrozenActor:
    """A reference that is the actor's own frozen weights: it takes no memory for any.

    Args:
      adapters: That the actor started from; empty where it started from the weights alone.
    """

    def __init__(self, actor: Actor, adapters: Params) -> None:
        self.place = actor.place
        self._actor, self._adapters = actor, adapters

    @verb(THREE_D_PROTO)
    def compute_ref_log_prob(self, rollout: Rollout | Sequences, *, temperature: float | None = None) -> Array:
        """As of any reference."""
        # Other weights than those that sampled; their routers choose for themselves.
        sequences = replace(sequences_of(rollout), choice_BTLk=None)
        return self._actor.frozen_log_prob(sequences, self._adapters, temperature=temperature)


class Reward:
    """Scores responses, by functions in a worker pool and by models.

    Functions may begin as soon as a response ends, while others are still generated; models score
    all responses together when they are asked to.

    Args:
      place: Among the processes that score, each by itself.
      decode: Token ids to text, without special tokens.
    """

    def __init__(
        self, scorer: Scorer, place: Place, decode: Callable[[Sequence[int]], str], progress: Progress
    ) -> None:
        self.place = place
        self._scorer, self._progress = scorer, progress
        self._text = cache(decode)  # a response is made text once; emptied when all are scored, or others begin
        self._ahead = np.zeros(2)

    def listen(self) -> Listener:
        """What is to be told of each response of a rollout that begins now."""
        self._text.cache_clear()
        self._scorer.open_batch()
        return self._begin

    def _begin(self, problem: Problem, completion: Completion) -> None:
        self._scorer.begin(problem.prompt, partial(self._text, completion.tokens), problem.answer, problem.record)

    def take_metrics(self) -> Metrics:
        """How much of the functions' work did not wait for `compute_reward`, since the last call."""
        (under_way, calls), self._ahead = self._ahead, np.zeros(2)
        return {"reward/overlapped_fraction": float(under_way / calls)} if calls else {}

    @verb(DP_PROTO)
    def compute_reward(self, problems: Sequence[Problem], rollout: Rollout) -> Scores:
        """The score of every response."""
        responses = response_texts(rollout, self._text)
        copies = len(responses) // len(problems)
        rows = [problem for problem in problems for _ in range(copies)]
        scores = self._scorer.score(
            [row.prompt for row in rows],
            responses,
            [row.answer for row in rows],
            [row.record for row in rows],
            finished=(~np.asarray(rollout.truncated_B)).tolist(),
            progress=lambda done, total: self._progress("reward", done, total),
        )
        self._text.cache_clear()
        self._ahead += self._scorer.ahead
        return scores


def sequences_of(rollout: Rollout | Sequences) -> Sequences:
    """The tokens of what was sampled, or of what was not."""
    return rollout.sequences if isinstance(rollout, Rollout) else rollout


def response_texts(rollout: Rollout, decode: Callable[[Sequence[int]], str]) -> list[str]:
    """The responses as text."""
    tokens, mask = rollout.sequences.token_BT, rollout.sequences.mask_BT
    return [decode(tuple(row[chosen].tolist())) for row, chosen in zip(tokens, mask, strict=True)]


WORKERS: dict[str, type] = {
    "actor": Actor,
    **dict.fromkeys(CRITICS, Critic),
    "process_reward": ProcessReward,
    "reference": Reference,
    "reward": Reward,
    ROLLOUT: Generator,
}
"""The worker of each role."""
