"""Protocol of reward functions, and the failures that they are told of.

A reward function reads texts and returns a number:

    def score(prompt: str, response: str, answer: str | None, record: Mapping) -> float | None

Marked with `@batched` it takes four lists and returns a list of numbers; the lists hold whatever
responses have ended by then, so no number may depend on the other responses; an exception in
place of a number says why that one has none. Either kind may be
`async def`; many examples of an async function are then in flight at once. Functions run in
worker processes, several at a time, and may be called again for an example whose
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
    """One response as a reward function sees it."""

    prompt: str
    response: str
    answer: str | None
    record: Mapping[str, Any]


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


def as_lists(examples: Sequence[Example]) -> tuple[list[str], list[str], list[str | None], list[Mapping[str, Any]]]:
    """The four arguments of a batched function."""
    return (
        [example.prompt for example in examples],
        [example.response for example in examples],
        [example.answer for example in examples],
        [example.record for example in examples],
    )
