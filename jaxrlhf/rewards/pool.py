"""Processes that run reward functions, each call under a wall-clock limit.

Whatever a function does (hang, crash, raise, print, return nonsense), it costs one example and
at most one process, which is killed and replaced. The module imports nothing heavy, and neither
do the processes.
"""

import pickle
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import as_completed
from dataclasses import dataclass

from jaxrlhf.config.named_functions import one_line
from jaxrlhf.rewards.crew import Crew, RewardCall
from jaxrlhf.rewards.protocol import Example, Failure
from jaxrlhf.rewards.worker import Answer

Packed = bytes | Answer
"""An example as it travels to a process, or the answer that says why it cannot."""

Begun = tuple[RewardCall, ...]
"""Functions on one example, in their order."""


@dataclass(frozen=True)
class Outcome:
    """The value of function number `function` on example number `index`, or why there is none."""

    function: int
    index: int
    value: float | None
    failure: Failure | None


class RewardPool:
    """Runs reward functions on examples and streams their results.

    Args:
      crew: Its processes, which end with the pool.
    """

    def __init__(self, crew: Crew) -> None:
        self._functions, self._crew = crew.functions, crew
        # Runs at close(), at garbage collection and at exit, whichever comes first.
        self._finalizer = weakref.finalize(self, crew.end)

    def close(self) -> None:
        """End the processes. A closed pool cannot run again."""
        self._finalizer()

    def __enter__(self) -> "RewardPool":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def begin(self, examples: Iterable[Packed], functions: Callable[[int], Sequence[int]] | None = None) -> list[Begun]:
        """Have functions run on examples; returns at once.

        Args:
          functions: Numbers of the functions that run on the n-th example; None is every one on all.

        Raises:
          RewardsFailing: If too many calls of a function failed in a row.
          RuntimeError: If the pool is closed, or its processes keep dying while they start.
        """
        every = range(len(self._functions))
        begun = [self._calls(packed, functions(n) if functions else every) for n, packed in enumerate(examples)]
        self._crew.submit(call for calls in begun for call in calls if not call.answer.done())
        return begun

    def _calls(self, packed: Packed, functions: Sequence[int]) -> Begun:
        if isinstance(packed, bytes):
            return tuple(RewardCall(function, packed) for function in functions)
        calls = tuple(RewardCall(function, b"") for function in functions)
        for call in calls:
            call.answer.set_result(packed)
        return calls

    def drop(self, begun: Iterable[Begun]) -> None:
        """Forget examples that were begun; nobody may ask for them any more."""
        self._crew.drop(call for calls in begun for call in calls)

    def finish(self, begun: Sequence[Begun]) -> Iterator[Outcome]:
        """Outcomes of examples that were begun, in the order of completion.

        Whoever stops listening drops what is not there yet.

        Raises:
          RewardsFailing: If too many calls of a function fail in a row.
          RuntimeError: If the pool is closed meanwhile, or its processes keep dying while they start.
        """
        asked = {call.answer: (index, call.function) for index, calls in enumerate(begun) for call in calls}
        try:
            for future in as_completed(asked):
                index, function = asked[future]
                yield self._outcome(function, index, future.result())
        finally:
            self.drop(begun)

    def run(self, examples: Sequence[Example]) -> Iterator[Outcome]:
        """Every function on every example, in the order of completion.

        Raises:
          RewardsFailing, RuntimeError: See `begin` and `finish`.
        """
        yield from self.finish(self.begin(map(pack, examples)))

    def _outcome(self, function: int, index: int, answer: Answer) -> Outcome:
        if answer.cause is None:
            return Outcome(function, index, answer.value, None)
        return Outcome(
            function, index, None, Failure(self._functions[function].name, index, answer.cause, answer.detail)
        )


def pack(example: Example) -> Packed:
    """The example as it travels to a process."""
    try:
        return pickle.dumps(example)
    except Exception as error:  # pickle lets through whatever an object's own hooks raise
        return Answer(0, None, "unpicklable", one_line(error))
