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
else:  # an algorithm is read, tested and planned without the workers
    Roles = Any

Metrics = dict[str, float]
State = dict[str, float]
AlgorithmSettings = TypeVar("AlgorithmSettings", bound=Algorithm, covariant=True)


@dataclass(frozen=True)
class StepInput(Generic[AlgorithmSettings]):
    """One step's work, for an algorithm with these settings.

    Attributes:
      index: 0 for the first step of the run.
      state: Numbers that the algorithm carries from step to step.
      draw_more: Draws as many records again; the run's data position moves on with every call.
      examples: Records of the algorithm's own data, if it has some.
      in_flight: Groups that go on from step to step; None where each step's begin and end in it.
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
        """Seed that differs from step to step and from run to run."""
        return int(np.random.SeedSequence([self.config.seed, self.index]).generate_state(1)[0] >> 1)


@dataclass(frozen=True)
class StepResult:
    """Metrics and state after a step's learning.

    Attributes:
      logp_BT: Log-probabilities of the rollout by the trainer, for the samples file; None if there are none.
      updates: Metrics of models that may still be in training; they join the step's.
      entropy_BT: Entropies of the rollout's first rows before the update, for the samples file; None if there are none.
    """

    metrics: Metrics
    state: State = field(default_factory=dict)
    logp_BT: Array | None = None
    updates: Sequence[Metrics | Future[Metrics]] = ()
    entropy_BT: Any = None

    def with_updates(self) -> "StepResult":
        """The result with the metrics of all updates, once they are made."""
        return replace(self, metrics=merged(self.metrics, *self.updates), updates=())


def merged(*parts: Metrics | Future[Metrics]) -> Metrics:
    """One dict out of several that share no name, waiting for those that are futures."""
    together: Metrics = {}
    for part in map(value_of, parts):
        assert not together.keys() & part.keys(), f"two parts report {sorted(together.keys() & part.keys())}"
        together |= part
    return together


def call(function: Callable[..., Any], rollout: Any, *args: Any) -> Any:
    """Run array maths of the controller on the results of futures, the sequences of each episode side by side."""
    return function(*side_by_side(value_of(rollout), tuple(map(value_of, args))))


def value_of(value: Any) -> Any:
    """A future's result; anything else as it is."""
    return value.result() if isinstance(value, Future) else value
