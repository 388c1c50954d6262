"""Schedules: when responses are collected, with which weights, and when they are learnt from."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from jaxrlhf.checkpoint import Item
from jaxrlhf.config import Algorithm, Config, Refusal, function_of
from jaxrlhf.data import Loader
from jaxrlhf.dataflows.step import Metrics, StepInput, StepResult
from jaxrlhf.single_controller.pools import Roles


@dataclass
class Synchronous:
    """Every step collects with the newest weights, and learns from all of it before the next one begins.

    Attributes:
      loader: Draws the step's problems.
      examples: Draws problems of the algorithm's own data, if it has some.
    """

    config: Config
    roles: Roles
    loader: Loader
    examples: Loader | None = None

    def step(self, index: int, state: dict[str, float], *, doing: Callable[[str], None]) -> tuple[Any, StepResult]:
        """One step of the algorithm.

        Args:
          index: 0 for the first step of the run.
          state: Numbers that the algorithm carries from step to step.
          doing: Told of each task as it begins, for error messages.

        Returns:
          Whatever the algorithm collected, and the result of learning from it. Models may still be in training.
        """
        doing("drawing data")
        work = self.draw(index, state)
        doing("running the algorithm")
        collected = self.collect(work)
        return collected, self.learn(work, collected)

    def draw(self, index: int, state: dict[str, float]) -> StepInput[Algorithm]:
        """The next records, as the input of a step."""
        problems = self.loader.next()
        examples = () if self.examples is None else self.examples.next()
        return StepInput(self.config, problems, index, state, self.loader.next, examples)

    def collect(self, work: StepInput[Algorithm]) -> Any:
        """Collect what the algorithm learns from; roles may still be at work on it."""
        return function_of(self.config.algorithm, "collect")(self.roles, work)

    def learn(self, work: StepInput[Algorithm], collected: Any) -> StepResult:
        """Update models on what was collected."""
        return function_of(self.config.algorithm, "learn")(self.roles, work, collected)

    @contextmanager
    def resting(self) -> Iterator[None]:
        """Have nothing collected within the block, for others to generate with the newest weights."""
        yield

    def metrics(self) -> Metrics:
        """Numbers of the last step's schedule, once its models are updated."""
        return {}

    def items(self) -> dict[str, Item]:
        """Items of a checkpoint beside the arrays of roles."""
        return {}

    def state(self) -> dict[str, Any]:
        """Position in the data, for a checkpoint."""
        return {"loader": self.loader.state(), **({} if self.examples is None else {"examples": self.examples.state()})}

    def restore(self, saved: dict[str, Any]) -> None:
        """Go on from a checkpoint's position.

        Raises:
          Refusal: Responses wait in it, to be learnt from at a staleness, or are under way.
        """
        if groups := saved.get("under_way", 0):
            raise Refusal(
                f"the checkpoint holds {groups} groups of responses that are under way, and rollout.over_provision=1 "
                "has none go on from step to step; resume with over_provision and staleness as they were"
            )
        if queued := saved.get("queued", 0):
            raise Refusal(
                f"the checkpoint holds responses of {queued} steps, and rollout.staleness=0 learns from none that "
                f"wait; resume with rollout.staleness={queued} or more"
            )
        self.loader.restore(saved["loader"])
        if self.examples is not None:
            self.examples.restore(saved["examples"])

    def close(self) -> None:
        """Begin nothing more, after the last step or an error."""
