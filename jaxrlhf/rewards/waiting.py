"""Calls of reward functions that wait for a process, and their way to the processes and back.

Calls are sent in chunks, because most functions take less time than a message. All code here runs on the executor's
thread.
"""

import math
import pickle
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from jaxrlhf.episode import FailureCause
from jaxrlhf.processes.jobs import Answer, Job
from jaxrlhf.processes.workers import WorkerGroup
from jaxrlhf.rewards.protocol import RESTART, Function, RewardsFailing

CHUNK_SIZE = 64  # calls in one message
FAILURES: tuple[FailureCause, ...] = ("timeout", "crash", "exception")  # other causes come from functions that work


@dataclass(eq=False)
class RewardCall:
    """Call of one function on one example.

    Attributes:
      function: Number of the function.
      pickled: Pickled example.
      answer: Future that is set when the function has returned or failed.
      started: The call was sent to a process.
      dropped: The answer is not needed any more.
    """

    function: int
    pickled: bytes
    answer: Future[Answer] = field(default_factory=Future)
    started: bool = False
    dropped: bool = False


class WaitingCalls:
    """Queue of calls for the processes of reward functions.

    Args:
      group: Processes of the functions.
      failures_in_a_row: Number of consecutive failures of one function that raises `RewardsFailing`; 0 never does.
    """

    def __init__(self, functions: Sequence[Function], group: WorkerGroup, *, failures_in_a_row: int) -> None:
        self._functions, self._group = functions, group
        self._together: Sequence[bool] = group.about.together
        self._most_failures, self._failed = failures_in_a_row, [0] * len(functions)
        self._queues: list[deque[RewardCall]] = [deque() for _ in functions]
        self._sent: list[tuple[Job, Sequence[RewardCall]]] = []

    def submit(self, calls: Iterable[RewardCall]) -> None:
        """Queue calls."""
        for call in calls:
            self._queues[call.function].append(call)

    def drop(self, calls: Iterable[RewardCall]) -> None:
        """Cancel calls: queued calls are removed, and a process that works only at cancelled calls is ended."""
        for call in calls:
            call.dropped = True
        for queue in self._queues:
            wanted = [call for call in queue if not call.dropped]
            queue.clear()
            queue.extend(wanted)
        for job, sent in self._sent:
            if job.left and all(sent[number].dropped for number in job.left):
                self._group.forget(job)

    def feed(self) -> None:
        """Send chunks for the idle processes.

        Queued calls of a function whose calls run together are divided among the idle processes. Chunks of other
        functions get smaller towards the end, so that all processes finish together.
        """
        workers = self._group.code.workers
        self._sent = [(job, calls) for job, calls in self._sent if not job.done]
        while (idle := workers - len(self._sent)) > 0 and any(self._queues):
            function = next(number for number, queue in enumerate(self._queues) if queue)
            queue, most = self._queues[function], self._functions[function].at_once
            if self._together[function]:
                count = min(most, math.ceil(len(queue) / idle))
            else:
                count = min(CHUNK_SIZE, math.ceil(len(queue) / (2 * workers)))
            self._send(function, [queue.popleft() for _ in range(count)])

    def over(self, error: BaseException) -> None:
        """Fail the queued calls."""
        for queue in self._queues:
            fail(queue, error)

    def _send(self, function: int, calls: Sequence[RewardCall]) -> None:
        for call in calls:
            call.started = True
        numbers = list(range(len(calls)))
        job = Job(
            pickle.dumps((function, [call.pickled for call in calls])),
            numbers,
            float,
            answered=lambda answer: self._resolve(calls[answer.number], answer),
            over=lambda error: fail([calls[number] for number in job.left], error),
            again=lambda again: self._make_again(function, [calls[number] for number in again]),
            together=range(len(calls)) if self._together[function] else (),
        )
        self._sent.append((job, calls))
        self._group.submit(job)

    def _make_again(self, function: int, calls: Sequence[RewardCall]) -> None:
        wanted = [call for call in calls if not call.dropped]
        if wanted and self._together[function]:
            self._send(function, wanted)
        else:
            self._queues[function].extendleft(reversed(wanted))

    def _resolve(self, call: RewardCall, answer: Answer) -> None:
        """Deliver an answer, or raise `RewardsFailing` at the limit of consecutive failures."""
        failure = answer.failure
        failed = self._failed[call.function] + 1 if failure and failure.cause in FAILURES else 0
        self._failed[call.function] = failed
        if failure is None or not failed or failed != self._most_failures:
            call.answer.set_result(answer)
            return
        function = self._functions[call.function]
        error = RewardsFailing(
            f"reward {function.name!r} ({function.reference}) failed on {failed} responses in a row and gave no answer "
            f"in between; the last time: {failure.cause}: {failure.detail}. Repair it, or what it depends on, and "
            f"{RESTART}"
        )
        call.answer.set_exception(error)
        raise error


def fail(calls: Iterable[RewardCall], error: BaseException) -> None:
    """Set an error as the result of calls."""
    for call in calls:
        call.answer.set_exception(error)
