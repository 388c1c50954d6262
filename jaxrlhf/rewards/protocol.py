"""Protocol of reward functions, and the failures that they are told of.

A reward function reads texts and returns a number:

    def score(prompt: str, response: str, answer: str | None, record: Mapping) -> float | None

One that has an argument `question` too is given the prompt without its chat template: what the
user asked or, of several messages, all of them with their roles. Marked with `@batched` it takes
lists of these and returns a list of numbers; they hold whatever responses have ended by then, so no
number may depend on the other responses; an exception in place of a number says why that one has
none. Either kind may be `async def`; many examples of an async function are then in flight at once.
Functions run in worker processes, several at a time, and may be called again for an example whose
batch failed.

A response is *unscorable*, which is not a score of 0, when the function returns None, NaN or
infinity, raises, exceeds the time limit, or takes its process down.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

Number = float | int | None
Cause = Literal["timeout", "crash", "exception", "none", "not-finite", "not-a-number", "unpicklable"]
Marked = TypeVar("Marked", bound=Callable[..., Any])


@dataclass(frozen=True)
class Example:
    """One response as a reward function sees it.

    Attributes:
      question: The prompt without its chat template; None is the prompt itself.
    """

    prompt: str
    response: str
    answer: str | None
    record: Mapping[str, Any]
    question: str | None = None


@dataclass(frozen=True)
class Failure:
    """Why one response has no score.

    Attributes:
      part: Name of the reward.
      index: Row of the response in its batch.
      cause: The kind of failure, for counting.
      detail: One line for a person: the exception and where it was raised, or how the process ended.
    """

    part: str
    index: int
    cause: Cause
    detail: str


class RewardsFailing(RuntimeError):
    """A reward function answers no call any more, so that a run would go on without learning anything."""


@dataclass(frozen=True)
class Function:
    """A reward function by reference, so that only worker processes run user code.

    Attributes:
      name: What logs and metrics call it.
      reference: `module:function` or `path/to/file.py:function`.
      settings: Keyword arguments bound to it.
      at_once: Examples that one process gives it at once, if it is batched or async.
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
    """True for `async def` functions and for objects whose `__call__` is one."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


def asks_question(function: Callable[..., Any]) -> bool:
    """True for functions with an argument `question`."""
    try:
        return "question" in inspect.signature(function).parameters
    except (TypeError, ValueError):  # some functions written in C do not tell
        return False


def called(function: Callable[..., Any], example: Example) -> Any:
    """The call of a function on an example."""
    further = {"question": example.question or example.prompt} if asks_question(function) else {}
    return function(*_arguments(example), **further)


def called_on_all(function: Callable[..., Any], examples: Sequence[Example]) -> Any:
    """The call of a batched function on examples."""
    columns = map(list, zip(*map(_arguments, examples), strict=True))
    questions = [example.question or example.prompt for example in examples]
    return function(*columns, **({"question": questions} if asks_question(function) else {}))


def _arguments(example: Example) -> tuple[str, str, str | None, Mapping[str, Any]]:
    return example.prompt, example.response, example.answer, example.record
