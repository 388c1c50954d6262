"""Input and result of an algorithm's step."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

import numpy as np

from jaxrlhf.batch import Array, Problem
from jaxrlhf.config import Algorithm, Config
from jaxrlhf.dataflows.batches.episode_rows import side_by_side

if TYPE_CHECKING:
    from jaxrlhf.dataflows.batches.in_flight import InFlight
    from jaxrlhf.single_controller.pools import Roles as Roles
else:  # algorithms are read, tested and planned without importing the workers
    Roles = Any

Metrics = dict[str, float]
State = dict[str, float]
AlgorithmSettings = TypeVar("AlgorithmSettings", bound=Algorithm, covariant=True)


@dataclass(frozen=True)
class StepInput(Generic[AlgorithmSettings]):
    """One step's work, for an algorithm with these settings.

    Attributes:
      index: Number of the step; 0 for the first step of the run.
      state: Numbers that the algorithm carries from step to step.
      draw_more: Function that returns the next batch of records; every call advances the run's data position.
      examples: Records of the algorithm's own data set, if it has one.
      in_flight: Groups that continue over several steps; None if every step completes its own groups.
    """

    config: Config
    problems: Sequence[Problem]
    index: int
    state: Mapping[str, float]
    draw_more: Callable[[], Sequence[Problem]] | None = None
    examples: Sequence[Problem] = ()
    in_flight: "InFlight | None" = None

    @property
    def settings(self) -> AlgorithmSettings:
        """Settings of the algorithm."""
        return cast(AlgorithmSettings, self.config.algorithm)

    @property
    def seed(self) -> int:
        """Seed of the step, derived from the run's seed and the step's index."""
        return int(np.random.SeedSequence([self.config.seed, self.index]).generate_state(1)[0] >> 1)


@dataclass(frozen=True)
class StepResult:
    """Metrics and state after a step's learning.

    Attributes:
      logp_BT: The trainer's log-probabilities of the rollout, for the samples file; None if not computed.
      updates: Metrics of models that may still be in training; `with_updates` merges them into the step's metrics.
      entropy_BT: Entropies of the rollout's first rows before the update, for the samples file; None if not computed.
    """

    metrics: Metrics
    state: State = field(default_factory=dict)
    logp_BT: Array | None = None
    updates: Sequence[Metrics | Future[Metrics]] = ()
    entropy_BT: Any = None

    def with_updates(self) -> "StepResult":
        """Return the result with the metrics of all updates merged in, waiting for the updates."""
        return replace(self, metrics=merged(self.metrics, *self.updates), updates=())


def merged(*parts: Metrics | Future[Metrics]) -> Metrics:
    """Merge disjoint dicts of metrics, waiting for futures."""
    together: Metrics = {}
    for part in map(value_of, parts):
        assert not together.keys() & part.keys(), (
            f"two parts report the same metrics {sorted(together.keys() & part.keys())}"
        )
        together |= part
    return together


def call(function: Callable[..., Any], rollout: Any, *args: Any) -> Any:
    """Run an array function of the controller on the results of futures, with each episode's sequences in one row."""
    return function(*side_by_side(value_of(rollout), tuple(map(value_of, args))))


def value_of(value: Any) -> Any:
    """Return the result of a future, or any other value unchanged."""
    return value.result() if isinstance(value, Future) else value
