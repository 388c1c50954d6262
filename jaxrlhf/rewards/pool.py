"""Process pool for reward functions, with a wall-clock limit for each call.

A function that hangs, crashes, raises, prints or returns nonsense costs one example and at most one process, and the
process is killed and replaced. The module and its processes import nothing heavy.
"""

import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import as_completed
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from jaxrlhf.config.named_functions import one_line
from jaxrlhf.processes.executor import Executor, ProcessPool
from jaxrlhf.processes.jobs import Answer, Code, CodeFailure
from jaxrlhf.rewards.protocol import Example, Failure, Function
from jaxrlhf.rewards.waiting import RewardCall, WaitingCalls, fail
from jaxrlhf.rewards.worker import Grouping

LARGEST_ANSWER = 1 << 20  # in bytes

Packed = bytes | CodeFailure
"""Pickled example, or the reason why the example cannot be pickled."""

Begun = tuple[RewardCall, ...]
"""Calls of the reward functions on one example, in the order of the functions."""


@dataclass(frozen=True)
class Outcome:
    """Value of function number `function` on example number `index`, or the failure if there is no value."""

    function: int
    index: int
    value: float | None
    failure: Failure | None


class RewardPool(ProcessPool):
    """Pool that runs reward functions on examples and streams their results.

    Args:
      functions: Functions that the processes load.
      workers: Largest number of processes.
      timeout_s: Wall-clock limit of one call in seconds.
      failures_in_a_row: Number of consecutive failures of one function that ends the pool; 0 never ends it.
      output: File that receives the output of the functions; None is the standard error stream.

    Raises:
      Refusal: A function cannot be loaded; the message says which and why.
    """

    def __init__(
        self,
        functions: Sequence[Function],
        *,
        workers: int,
        timeout_s: float,
        failures_in_a_row: int = 0,
        output: Path | None = None,
    ) -> None:
        self._functions = tuple(functions)
        code = Code(
            name=", ".join(function.reference for function in functions),
            loader="jaxrlhf.rewards.worker:load_functions",
            setup=(self._functions, timeout_s),
            about=Grouping,
            limit_s=timeout_s,
            workers=workers,
            largest_answer=LARGEST_ANSWER,
        )
        super().__init__(Executor([code], output, name="reward functions"))
        [group] = self._executor.groups
        self._waiting = WaitingCalls(self._functions, group, failures_in_a_row=failures_in_a_row)
        self._executor.start(self._waiting)

    def begin(self, examples: Iterable[Packed], functions: Callable[[int], Sequence[int]] | None = None) -> list[Begun]:
        """Submit examples to reward functions and return the calls at once.

        Args:
          functions: Maps the index of an example to the numbers of its functions; None runs all functions on all.

        Raises:
          RewardsFailing: Too many calls of a function failed in a row.
          RuntimeError: The pool is closed, or its processes cannot be started any more.
        """
        every = range(len(self._functions))
        begun = [self._calls(packed, functions(n) if functions else every) for n, packed in enumerate(examples)]
        calls = [call for calls in begun for call in calls if not call.answer.done()]
        self._executor.ask(partial(self._waiting.submit, calls), partial(fail, calls))
        if self._executor.error is not None:
            raise self._executor.error
        return begun

    def _calls(self, packed: Packed, functions: Sequence[int]) -> Begun:
        if isinstance(packed, bytes):
            return tuple(RewardCall(function, packed) for function in functions)
        calls = tuple(RewardCall(function, b"") for function in functions)
        for call in calls:
            call.answer.set_result(Answer(0, None, packed))
        return calls

    def drop(self, begun: Iterable[Begun]) -> None:
        """Cancel submitted examples; their calls must not be awaited after that."""
        unanswered = [call for calls in begun for call in calls if not call.answer.done()]
        if unanswered:
            self._executor.ask(partial(self._waiting.drop, unanswered))

    def finish(self, begun: Sequence[Begun]) -> Iterator[Outcome]:
        """Yield the outcomes of submitted examples in the order of completion.

        Closing the generator early drops the outstanding calls.

        Raises:
          RewardsFailing: Too many calls of a function fail in a row.
          RuntimeError: The pool is closed meanwhile, or its processes cannot be started any more.
        """
        asked = {call.answer: (index, call.function) for index, calls in enumerate(begun) for call in calls}
        try:
            for future in as_completed(asked):
                index, function = asked[future]
                yield self._outcome(function, index, future.result())
        finally:
            self.drop(begun)

    def run(self, examples: Sequence[Example]) -> Iterator[Outcome]:
        """Run every function on every example and yield the outcomes in the order of completion.

        Raises:
          RewardsFailing, RuntimeError: See `begin` and `finish`.
        """
        yield from self.finish(self.begin(map(pack, examples)))

    def _outcome(self, function: int, index: int, answer: Answer) -> Outcome:
        failure = answer.failure
        if failure is None:
            return Outcome(function, index, answer.value, None)
        name = self._functions[function].name
        return Outcome(function, index, None, Failure(name, index, failure.cause, failure.detail))


def pack(example: Example) -> Packed:
    """Pickle an example for the processes."""
    try:
        return pickle.dumps(example)
    except Exception as error:  # an object's pickling hooks may raise any error
        return CodeFailure("unpicklable", one_line(error))
