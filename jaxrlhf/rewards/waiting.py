"""Calls of reward functions that wait for a process, and their way to the processes and back.

Calls are sent in chunks, because most functions take less time than a message. When a process dies, its current call
gets the blame and the rest of its chunk goes back to the queue. All code here runs on the executor's thread.
"""

import math
import pickle
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial

from jaxrlhf.processes.channel import Garbled
from jaxrlhf.processes.jobs import Idle, Job, Lost
from jaxrlhf.processes.workers import WorkerGroup
from jaxrlhf.rewards.protocol import Cause, Function, RewardsFailing
from jaxrlhf.rewards.worker import Answer, Split

CHUNK_SIZE = 64  # calls in one message
FAILURES: tuple[Cause, ...] = ("timeout", "crash", "exception")  # other causes come from functions that work


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


@dataclass(eq=False)
class _SentChunk:
    """Chunk that a process works at: its unanswered calls by number, the current call first."""

    function: int
    calls: dict[int, RewardCall]
    answered: bool = False
    job: Job | None = None


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
        self._sent: list[_SentChunk] = []

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
        for chunk in list(self._sent):
            if chunk.job is not None and all(call.dropped for call in chunk.calls.values()):
                self._sent.remove(chunk)
                self._group.forget(chunk.job)

    def feed(self) -> None:
        """Send chunks for the idle processes.

        Queued calls of a function that takes groups are divided among the idle processes. Chunks of other functions get
        smaller towards the end, so that all processes finish together.
        """
        workers = self._group.code.workers
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
        chunk = _SentChunk(function, dict(enumerate(calls)))
        for call in calls:
            call.started = True
        chunk.job = Job(
            pickle.dumps((function, [call.pickled for call in calls])),
            (Answer, Split),
            partial(self._answered, chunk),
            partial(self._lost, chunk),
            lambda error: fail(chunk.calls.values(), error),
        )
        self._sent.append(chunk)
        self._group.submit(chunk.job)

    def _answered(self, chunk: _SentChunk, answer: Answer | Split | Idle) -> None:
        match answer:
            case Answer(index) if index in chunk.calls and (answer.value is None) != (answer.cause is None):
                chunk.answered = True
                self._resolve(chunk.calls.pop(index), answer)
            case Split() if len(chunk.calls) > 1:
                calls, chunk.calls, chunk.answered = list(chunk.calls.values()), {}, True
                self._send_singly(chunk.function, calls)
            case Idle(spoilt) if chunk.answered and (spoilt or not chunk.calls):
                self._sent.remove(chunk)
                self._requeue(chunk.calls.values())
            case _:
                raise Garbled("an answer to no call, or no answer to a call")

    def _lost(self, chunk: _SentChunk, lost: Lost) -> None:
        """Blame the current call of a chunk, and make the other calls again; make calls that ran together singly."""
        if chunk not in self._sent:  # all its calls were dropped
            return
        self._sent.remove(chunk)
        left = [call for call in chunk.calls.values() if not call.dropped]
        if self._together[chunk.function] and len(left) > 1:
            self._send_singly(chunk.function, left)
            return
        self._requeue(left[1:])
        for call in left[:1]:
            self._resolve(call, Answer(0, None, lost.cause, lost.detail))

    def _resolve(self, call: RewardCall, answer: Answer) -> None:
        """Deliver an answer, or raise `RewardsFailing` at the limit of consecutive failures."""
        failed = self._failed[call.function] + 1 if answer.cause in FAILURES else 0
        self._failed[call.function] = failed
        if not failed or failed != self._most_failures:
            call.answer.set_result(answer)
            return
        function = self._functions[call.function]
        error = RewardsFailing(
            f"reward {function.name!r} ({function.reference}) failed on {failed} responses in a row and gave no answer "
            f"in between; the last time: {answer.cause}: {answer.detail}. Repair it, or what it depends on, and start "
            "the run again, which goes on from its last checkpoint; rewards.failures_in_a_row says how many are too "
            "many, and 0 never stops a run"
        )
        call.answer.set_exception(error)
        raise error

    def _send_singly(self, function: int, calls: Iterable[RewardCall]) -> None:
        for call in calls:
            self._send(function, [call])

    def _requeue(self, calls: Iterable[RewardCall]) -> None:
        for call in reversed(list(calls)):
            self._queues[call.function].appendleft(call)


def fail(calls: Iterable[RewardCall], error: BaseException) -> None:
    """Set an error as the result of calls."""
    for call in calls:
        call.answer.set_exception(error)
