"""Schedules: the order of collecting and learning, and the weights that collect. This file has the synchronous one."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from jaxrlhf.checkpoint import Item
from jaxrlhf.config import Algorithm, Config, Refusal, function_of
from jaxrlhf.data import Loader
from jaxrlhf.dataflows.batches.scored import ScoredRollout
from jaxrlhf.dataflows.step import Metrics, StepInput, StepResult, value_of
from jaxrlhf.single_controller.pools import Roles
from jaxrlhf.single_controller.ray.failure import HostDied, HostHung


def wait_for_responses(collected: Any) -> None:
    """Wait until the collected responses exist, and raise the error of a failed one; scores may still be pending."""
    for rollout in rollouts_of(collected):
        if isinstance(rollout, Future) and (error := rollout.exception()) is not None:
            raise error


def rollouts_of(collected: Any) -> list[Any]:
    """Return all collected rollouts, or their futures: the rollout itself and further ones, such as `beside`."""
    if not isinstance(collected, ScoredRollout):
        return []
    return [collected.rollout, *(one for value in vars(collected).values() for one in rollouts_of(value))]


@dataclass
class Synchronous:
    """Synchronous schedule: every step collects with the newest weights and learns before the next step starts.

    Attributes:
      loader: Loader of the step's problems.
      examples: Loader of the algorithm's own data set, if it has one.
    """

    config: Config
    roles: Roles
    loader: Loader
    examples: Loader | None = None

    def step(self, index: int, state: dict[str, float], *, doing: Callable[[str], None]) -> tuple[Any, StepResult]:
        """Run one step of the algorithm.

        Args:
          index: Number of the step; 0 for the first step of the run.
          state: Numbers that the algorithm carries from step to step.
          doing: Called with the name of each task when the task starts, for error messages.

        Returns:
          The collected data, and the result of learning from it. Models may still be in training.
        """
        doing("loading data")
        work = self.draw(index, state)
        doing("running the algorithm")
        collected = self.collect(work)
        return collected, self.learn(work, collected)

    def draw(self, index: int, state: dict[str, float]) -> StepInput[Algorithm]:
        """Load the next records, as the input of a step."""
        problems = self.loader.next()
        examples = () if self.examples is None else self.examples.next()
        return StepInput(self.config, problems, index, state, self.loader.next, examples)

    def collect(self, work: StepInput[Algorithm]) -> Any:
        """Collect the data that the algorithm learns from; parts of it may still be futures."""
        return self.collect_with(lambda: self.roles, work)

    def collect_with(self, roles: Callable[[], Roles], work: StepInput[Algorithm]) -> Any:
        """Collect; if hosts that only generate fail, start over after they are relaunched.

        Args:
          roles: Returns the roles that collect; called at every attempt.
        """
        cluster, position = self.config.cluster, self.loader.state()
        relaunches = cluster is not None and cluster.restarts > 0 and self.config.generates_apart
        while True:
            try:
                collected = function_of(self.config.algorithm, "collect")(roles(), work)
                for rollout in rollouts_of(collected) if relaunches else ():
                    value_of(rollout)  # brought to this process, where responses outlive the hosts that sampled them
            except (HostDied, HostHung) as failed:
                if not self.roles.relaunch(failed):
                    raise
                self.loader.restore(position)
            else:
                return collected

    def learn(self, work: StepInput[Algorithm], collected: Any) -> StepResult:
        """Update models on the collected data."""
        return learn_from(self.roles, work, collected)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Pause collection within the block, so that an evaluation can generate with the newest weights."""
        yield

    def metrics(self) -> Metrics:
        """Return the schedule's metrics of the last step, once its models are updated."""
        return {}

    def items(self) -> dict[str, Item]:
        """Return the schedule's checkpoint items, in addition to the roles' arrays."""
        return {}

    def state(self) -> dict[str, Any]:
        """Return the position in the data, for a checkpoint."""
        return {"loader": self.loader.state(), **({} if self.examples is None else {"examples": self.examples.state()})}

    def restore(self, saved: dict[str, Any]) -> None:
        """Continue from a checkpoint's position.

        Raises:
          Refusal: The checkpoint holds queued responses, or groups in flight, of an off-policy schedule.
        """
        if groups := saved.get("under_way", 0):
            raise Refusal(
                f"the checkpoint holds {groups} unfinished groups of responses, but rollout.over_provision=1 "
                "continues none; resume with the original rollout.over_provision and rollout.staleness"
            )
        if queued := saved.get("queued", 0):
            raise Refusal(
                f"the checkpoint holds queued responses of {queued} steps, but rollout.staleness=0 allows none; "
                f"resume with rollout.staleness={queued} or more"
            )
        self.loader.restore(saved["loader"])
        if self.examples is not None and "examples" in saved:  # else the run had none: start from the first
            self.examples.restore(saved["examples"])

    def close(self) -> None:
        """Start nothing more, after the last step or an error."""


def learn_from(roles: Roles, work: StepInput[Algorithm], collected: Any) -> StepResult:
    """Update models on the collected data; before that, compute the entropies that the samples file records."""
    wanted, entropy_BT = work.config.token_records, None
    if wanted.entropy and isinstance(collected, ScoredRollout):
        entropy_BT = roles.actor.compute_entropy(_first_rows(collected, wanted.responses, work.config))
    result = function_of(work.config.algorithm, "learn")(roles, work, collected)
    return replace(result, entropy_BT=entropy_BT) if isinstance(result, StepResult) else result


def _first_rows(collected: ScoredRollout, responses: int, config: Config) -> Any:
    """Return the rows of the first responses or episodes; on a cluster at least `prompts_per_step` rows, to split."""
    rollout = value_of(collected.rollout)
    if rollout.episodes is not None:
        start_E = rollout.episodes.start_E
        responses = int(start_E[responses]) if responses < len(start_E) else len(rollout.truncated_B)
    count = responses if config.cluster is None else max(responses, config.rollout.prompts_per_step)
    return rollout.take(slice(count))
