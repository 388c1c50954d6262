"""Process pool for reward functions, with a wall-clock limit for each call.

A function that hangs, crashes, raises or returns an invalid value loses one example and at most one process, which is
killed and replaced. Neither this module nor the processes import anything heavy.
"""

import pickle
from collections.abc import Iterable, Iterator, Sequence
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

ExampleCalls = tuple[RewardCall, ...]
"""Calls of reward functions on one example, in the order of the functions."""


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

    def start(self, examples: Iterable[tuple[Packed, Sequence[int]]]) -> list[ExampleCalls]:
        """Submit examples, each with the numbers of the functions to call on it, and return the calls at once.

        Raises:
          RewardsFailing: Too many calls of a function failed in a row.
          RuntimeError: The pool is closed, or its processes cannot be started any more.
        """
        started = [self._calls(packed, functions) for packed, functions in examples]
        calls = [call for several in started for call in several if not call.answer.done()]
        self._executor.ask(partial(self._waiting.submit, calls), partial(fail, calls))
        if self._executor.error is not None:
            raise self._executor.error
        return started

    def _calls(self, packed: Packed, functions: Sequence[int]) -> ExampleCalls:
        if isinstance(packed, bytes):
            return tuple(RewardCall(function, packed) for function in functions)
        calls = tuple(RewardCall(function, b"") for function in functions)
        for call in calls:
            call.answer.set_result(Answer(0, None, packed))
        return calls

    def drop(self, started: Iterable[ExampleCalls]) -> None:
        """Cancel submitted examples; their calls must not be awaited after that."""
        unanswered = [call for calls in started for call in calls if not call.answer.done()]
        if unanswered:
            self._executor.ask(partial(self._waiting.drop, unanswered))

    def outcomes(self, started: Sequence[ExampleCalls]) -> Iterator[Outcome]:
        """Yield the outcomes of submitted examples in the order of completion.

        Closing the generator early drops the outstanding calls.

        Raises:
          RewardsFailing: Too many calls of a function fail in a row.
          RuntimeError: The pool is closed, or its processes cannot be started any more.
        """
        numbers = {call.answer: (call.function, index) for index, calls in enumerate(started) for call in calls}
        try:
            for future in as_completed(numbers):
                (function, index), answer = numbers[future], future.result()
                failure = None
                if (why := answer.failure) is not None:
                    failure = Failure(self._functions[function].name, index, why.cause, why.detail)
                yield Outcome(function, index, answer.value, failure)
        finally:
            self.drop(started)


def pack(example: Example) -> Packed:
    """Pickle an example for the processes."""
    try:
        return pickle.dumps(example)
    except Exception as error:  # an object's pickling hooks may raise any error
        return CodeFailure("unpicklable", one_line(error))
