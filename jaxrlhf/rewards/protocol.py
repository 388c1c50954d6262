"""Protocol of reward functions, and the failures that are reported for them.

A reward function reads texts and returns a number:

    def score(prompt: str, response: str, answer: str | None, record: Mapping) -> float | None

A function with an argument `question` also receives the prompt without its chat template: the user's message or, if
there are several messages, all messages with their roles.

A function marked with `@batched` takes lists of these arguments and returns a list of numbers. A batch holds the
responses that happen to have ended, so no number may depend on the other responses of the batch. An exception in place
of a number is the reason why its response has no score.

Both kinds may be `async def`; many examples of an async function are in flight at once. Functions run in worker
processes, several at a time, and may be called again for an example whose batch failed.

A response is *unscorable*, which differs from a score of 0, when the function returns None, NaN or infinity, raises,
exceeds the time limit, or crashes its process.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from jaxrlhf.episode import FailureCause

Number = float | int | None
Marked = TypeVar("Marked", bound=Callable[..., Any])


@dataclass(frozen=True)
class Example:
    """One response with the inputs of a reward function.

    Attributes:
      question: Prompt without its chat template; None uses the prompt itself.
    """

    prompt: str
    response: str
    answer: str | None
    record: Mapping[str, Any]
    question: str | None = None


@dataclass(frozen=True)
class Failure:
    """Reason why one response has no score.

    Attributes:
      part: Name of the reward.
      index: Row of the response in its batch.
      cause: Kind of failure, for counting.
      detail: One line for users: the exception and where it was raised, or how the process ended.
    """

    part: str
    index: int
    cause: FailureCause
    detail: str


class RewardsFailing(RuntimeError):
    """Error: reward functions give no answers any more, so that the run would continue without learning anything."""


RESTART = (
    "start the run again: it resumes from its last checkpoint. rewards.failures_in_a_row is the number of failures "
    "that stops a run; 0 never stops it"
)
"""Advice of a `RewardsFailing`."""


@dataclass(frozen=True)
class Function:
    """Reference to a reward function; only worker processes load it, so that only they run user code.

    Attributes:
      name: Name in logs and metrics.
      reference: `module:function` or `path/to/file.py:function`.
      settings: Keyword arguments bound to the function.
      at_once: Maximum number of examples that one process passes at once to a batched or async function.
    """

    name: str
    reference: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    at_once: int = 64


def batched(function: Marked) -> Marked:
    """Declare that `function` takes lists of prompts, responses, answers and records."""
    function.batched = True  # type: ignore[attr-defined]
    return function


def is_batched(function: Callable[..., Any]) -> bool:
    return getattr(getattr(function, "func", function), "batched", False)  # `func` is what a partial binds


def is_async(function: Callable[..., Any]) -> bool:
    """Return True for `async def` functions and for objects with an `async def __call__`."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


def asks_question(function: Callable[..., Any]) -> bool:
    """Return True for functions with an argument `question`."""
    try:
        return "question" in inspect.signature(function).parameters
    except (TypeError, ValueError):  # some functions written in C have no signature
        return False


def called(function: Callable[..., Any], example: Example) -> Any:
    """Call a function on an example."""
    further = {"question": example.question or example.prompt} if asks_question(function) else {}
    return function(*_arguments(example), **further)


def called_on_all(function: Callable[..., Any], examples: Sequence[Example]) -> Any:
    """Call a batched function on examples."""
    columns = map(list, zip(*map(_arguments, examples), strict=True))
    questions = [example.question or example.prompt for example in examples]
    return function(*columns, **({"question": questions} if asks_question(function) else {}))


def _arguments(example: Example) -> tuple[str, str, str | None, Mapping[str, Any]]:
    return example.prompt, example.response, example.answer, example.record
