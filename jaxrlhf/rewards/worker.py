"""Reward functions in a worker process: loads them, and answers chunks of calls with a message for each outcome.

A chunk holds calls of one function. A batched function takes them at once, calls of an async function run concurrently,
and a plain function is called on one after the other.
"""

import functools
import os
import pickle
import sys
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from jaxrlhf.config.named_functions import check_call, load
from jaxrlhf.processes.calls import Calls
from jaxrlhf.processes.channel import Channel
from jaxrlhf.processes.jobs import CodeFailure, Split
from jaxrlhf.processes.plain import is_finite, is_number, short_repr
from jaxrlhf.rewards.protocol import (
    Function,
    asks_question,
    called,
    called_on_all,
    is_async,
    is_batched,
)

THREADS = "/proc/self/task"


@dataclass(frozen=True)
class Grouping:
    """Description of the functions: `together[i]` is True if calls of function i run together."""

    together: tuple[bool, ...]


Chunk = tuple[int, list[bytes]]
"""Number of a function, and pickled examples; their positions are the numbers of the calls."""


def load_functions(setup: tuple[Sequence[Function], float]) -> "RewardCode":
    """Load reward functions, which have a time limit for one call in seconds.

    Raises:
      Refusal: A function cannot be loaded; the message says which and why.
    """
    functions, timeout_s = setup
    return RewardCode([resolve(function.reference, function.settings) for function in functions], timeout_s)


def _is_one_thread() -> bool:
    """Return False if this process has started native threads, which Python does not count; Linux only."""
    return not os.path.isdir(THREADS) or len(os.listdir(THREADS)) == 1


@dataclass(frozen=True)
class RewardCode:
    """Loaded reward functions.

    Attributes:
      forkable: False if the functions' modules have started threads, because a fork does not have these threads.
    """

    functions: Sequence[Callable[..., Any]]
    timeout_s: float
    forkable: bool = field(default_factory=_is_one_thread)

    @property
    def about(self) -> Grouping:
        return Grouping(tuple(is_batched(function) or is_async(function) for function in self.functions))

    def serve(self, channel: Channel) -> None:
        """Answer chunks until the channel closes."""
        if (numpy := sys.modules.get("numpy")) is not None:
            numpy.random.seed()  # Python's generator seeds itself in a fork
        calls = Calls(channel, limit_s=self.timeout_s)
        calls.serve(functools.partial(self._answer, calls))

    def _answer(self, calls: Calls, chunk: Chunk) -> None:
        number, examples = chunk
        function = self.functions[number]

        def make_call(pickled: bytes) -> float | CodeFailure:
            return score(calls, calls.call(called, function, pickle.loads(pickled)))

        async def make_async(pickled: bytes) -> float | CodeFailure:
            return score(calls, await calls.awaited(called(function, pickle.loads(pickled))))

        if is_batched(function):
            _call_batch(calls, function, examples)
            calls.restore()
        elif is_async(function):
            calls.answer_together((index, functools.partial(make_async, one)) for index, one in enumerate(examples))
            calls.restore()
        else:
            calls.answer_in_turn((index, functools.partial(make_call, one)) for index, one in enumerate(examples))
        if not calls.spoilt:
            return
        with suppress(OSError):  # standard error may be what was closed
            print(f"this reward process ends, and another one replaces it: {calls.spoilt}", file=sys.stderr)


def resolve(reference: str, settings: Mapping[str, Any] | None = None) -> Callable[..., Any]:
    """Load the function that `module:function` or `path/to/file.py:function` names, and bind `settings` to it.

    A setting that is a `Function` is resolved too. The directory of a `file.py` is appended to `sys.path`, so the file
    may import its neighbors.

    Raises:
      Refusal: In one line: there is no such file, module or function, its import fails, or the function cannot be
        called with a prompt, a response, an answer and a record.
    """
    function = load(reference, "reward function")
    given = {
        name: resolve(value.reference, value.settings) if isinstance(value, Function) else value
        for name, value in (settings or {}).items()
    }
    bound = functools.partial(function, **given) if given else function
    check_call(
        f"reward function {reference!r}",
        bound,
        *("prompt", "response", "answer", "record"),
        **({"question": "question"} if asks_question(bound) else {}),
    )
    return bound


def _call_batch(calls: Calls, function: Callable[..., Any], examples: Sequence[bytes]) -> None:
    try:
        values = calls.call(called_on_all, function, list(map(pickle.loads, examples)))
        found = scores(calls, len(examples), values)
    except BaseException as error:
        failure = calls.failure(error)
        if len(examples) > 1:
            calls.send(Split())
            return
        found = [failure]
    for index, one in enumerate(found):
        calls.answer_value(index, one)


def score(calls: Calls, value: Any) -> float | CodeFailure:
    """Convert the value of a function to a finite number, or to the cause of failure."""
    if isinstance(value, BaseException):
        return calls.failure(value)
    if value is None:
        return CodeFailure("none", "returned None")
    if not is_number(value):
        return CodeFailure("not-a-number", f"returned a {type(value).__name__}: {short_repr(value)}, not a number")
    number = float(value)
    return number if is_finite(number) else CodeFailure("not-finite", f"returned {number}")


def scores(calls: Calls, count: int, values: Any) -> list[float | CodeFailure]:
    """Convert the values of a batched function; all are failures if the number of values is wrong."""
    sized = hasattr(values, "__iter__") and not isinstance(values, str | bytes | Mapping | Set)  # no order there
    found = list(values) if sized and getattr(values, "shape", True) else None  # an array may be a number
    if found is not None and len(found) == count:
        return [score(calls, value) for value in found]
    returned = f"a {type(values).__name__}: {short_repr(values)}" if found is None else f"{len(found)} scores"
    wrong = f"returned {returned} for {count} responses; a batched function gives a list, one score for each"
    return [CodeFailure("exception", wrong)] * count
