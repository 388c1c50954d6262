"""Processes of a reward pool, and the thread that feeds and watches them.

Calls are sent in chunks, because most functions take less time than a message. When a process dies, its current call
gets the blame and the rest of its chunk goes back to the queue.
"""

import math
import os
import pickle
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from socket import socketpair

from jaxrlhf.config import Refusal
from jaxrlhf.processes.guards import SLACK_S
from jaxrlhf.processes.interpreter import Interpreter
from jaxrlhf.rewards.protocol import Cause, Function, RewardsFailing
from jaxrlhf.rewards.worker import Answer, Message, Ready, Refused, Retiring, Split

CHUNK_SIZE = 64  # groups in one message
LARGEST_MESSAGE_BYTES = 1 << 20  # from a process; text that a function wrote into the pipe decodes to a larger length
START_LIMIT_S = 120.0  # for importing the functions' modules
START_ATTEMPTS = 3
GRACE_S = 1.0  # after the limit; a process normally ends itself at the limit
FAILURES: tuple[Cause, ...] = ("timeout", "crash", "exception")  # other causes come from functions that work


@dataclass(eq=False)
class RewardCall:
    """Call of one function on one example.

    Attributes:
      function: Number of the function.
      pickled: Pickled example.
      answer: Future that is set when the function has returned or failed.
      started: The call was sent to a process.
      alone: The call is not to be grouped with others, because its group failed before.
      dropped: The answer is not needed any more.
    """

    function: int
    pickled: bytes
    answer: Future[Answer] = field(default_factory=Future)
    started: bool = False
    alone: bool = False
    dropped: bool = False


@dataclass
class _Group:
    """Calls that a function takes at once, by number; answered calls are removed."""

    function: int
    calls: dict[int, RewardCall]


@dataclass
class _Worker:
    """Process with its unanswered groups; it works at the first group."""

    interpreter: Interpreter
    connection: Connection
    ready: bool = False
    groups: deque[_Group] = field(default_factory=deque)
    progress_at: float = field(default_factory=time.monotonic)

    def idle_s(self) -> float:
        return time.monotonic() - self.progress_at

    def calls(self) -> Iterator[RewardCall]:
        for group in self.groups:
            yield from group.calls.values()

    def end(self, *, patience_s: float) -> str:
        """Wait `patience_s`, kill the process and its descendants, and return a description of how it ended."""
        self.connection.close()
        return self.interpreter.end(patience_s=patience_s)


class Crew:
    """Group of reward processes that answers calls, in any order, until `end`.

    All methods except `submit`, `drop` and `end` run on the crew's thread.

    Args:
      functions: Functions that every process loads when it starts.
      workers: Number of processes.
      timeout_s: Wall-clock limit of one call in seconds.
      failures_in_a_row: Number of consecutive failures of one function that ends the crew; 0 never ends it.
      output: File that receives the output of the functions; None is the standard error stream.

    Raises:
      Refusal: A function cannot be loaded; the message says which and why.
      RuntimeError: Processes keep dying during their start.
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
        self.functions = tuple(functions)
        self._timeout_s = timeout_s
        self._output = output
        self._most_failures, self._failed = failures_in_a_row, [0] * len(self.functions)
        self._failed_starts = 0
        self._takes_groups: tuple[bool, ...] = ()
        self._queues: list[deque[RewardCall]] = [deque() for _ in functions]
        self._alone: deque[RewardCall] = deque()
        self.workers: list[_Worker] = []
        self._owner = os.getpid()
        self._lock = threading.Lock()  # guards `_arrived` and `_over`, which other threads access
        self._arrived: list[RewardCall] = []
        self._over: BaseException | None = None
        self._dropping = False
        self._bell, self._ring = socketpair()  # a byte sent into `_ring` wakes the thread, which waits at `_bell`
        self._ring.setblocking(False)
        self._thread = threading.Thread(target=self._work, name="rewards", daemon=True)
        try:
            self.workers.extend(self._start() for _ in range(workers))
            while not all(worker.ready for worker in self.workers):
                self._collect()
        except BaseException:
            self._end_workers()
            raise
        self._thread.start()

    def submit(self, calls: Iterable[RewardCall]) -> None:
        """Queue calls and return at once.

        Raises:
          RewardsFailing: Too many calls of a function failed in a row.
          RuntimeError: The crew has ended, or its processes keep dying during their start.
        """
        with self._lock:
            if self._over is not None:
                raise self._closed()
            others_arrived = bool(self._arrived)
            self._arrived.extend(calls)
        if not others_arrived:  # else the thread is awake, or will be
            self._wake()

    def drop(self, calls: Iterable[RewardCall]) -> None:
        """Cancel calls: queued calls are removed, and a process that works only at cancelled calls is replaced."""
        unanswered = [call for call in calls if not call.answer.done()]
        if unanswered:
            for call in unanswered:
                call.dropped = True
            self._dropping = True
            self._wake()

    def end(self) -> None:
        """End the processes; unanswered calls fail."""
        if os.getpid() != self._owner:  # this process is a fork of the crew's owner
            return
        with self._lock:
            self._over = self._over or RuntimeError("this reward pool is closed")
        self._wake()
        if threading.current_thread() is not self._thread:  # else a finalizer runs on this thread, which ends anyway
            self._thread.join()

    def _wake(self) -> None:
        with suppress(OSError):  # the socket buffer is full, so the thread wakes anyway, or the thread is gone
            self._ring.send(b"\0")

    def _work(self) -> None:
        try:
            while self._over is None:
                if self._dropping:
                    self._forget_dropped()
                self._take_arrived()
                self._feed()
                self._collect()
        except BaseException as error:  # all open futures receive this error
            with self._lock:
                self._over = error
        finally:
            self._take_arrived()
            waiting = [call for queue in (self._alone, *self._queues) for call in queue]
            for call in [*waiting, *(call for worker in self.workers for call in worker.calls())]:
                call.answer.set_exception(self._closed())
            self._end_workers()

    def _closed(self) -> BaseException:
        if isinstance(self._over, RewardsFailing):
            return self._over
        error = RuntimeError(f"reward functions cannot be called: {self._over}")
        error.__cause__ = self._over
        return error

    def _take_arrived(self) -> None:
        with self._lock:
            arrived, self._arrived = self._arrived, []
        for call in arrived:
            self._queues[call.function].append(call)

    def _forget_dropped(self) -> None:
        self._dropping = False  # first, since more may be dropped meanwhile
        self._take_arrived()
        for queue in (self._alone, *self._queues):
            wanted = [call for call in queue if not call.dropped]
            queue.clear()
            queue.extend(wanted)
        for worker in list(self.workers):
            if worker.groups and all(call.dropped for call in worker.calls()):
                self._replace(worker, patience_s=0.0)

    def _feed(self) -> None:
        """Send a chunk to every idle process."""
        idle = [worker for worker in self.workers if worker.ready and not worker.groups]
        for position, worker in enumerate(idle):
            groups = self._next_chunk(idle=len(idle) - position)
            if not groups:
                return
            calls = [call for group in groups for call in group.calls.values()]
            message = [(g.function, [(number, call.pickled) for number, call in g.calls.items()]) for g in groups]
            try:
                worker.connection.send(message)
            except OSError:  # the process died while it was idle
                self._requeue(calls)
                self._replace(worker, patience_s=GRACE_S)
                continue
            for call in calls:
                call.started = True
            worker.groups.extend(groups)
            worker.progress_at = time.monotonic()

    def _next_chunk(self, *, idle: int) -> list[_Group]:
        """Take the next groups from the queues, for one of `idle` processes.

        Queued calls of a function that takes groups are divided among the idle processes. Chunks of single calls get
        smaller towards the end, so that all processes finish together.
        """
        queue = next((queue for queue in (self._alone, *self._queues) if queue), None)
        if queue is None:
            return []
        function = queue[0].function
        if queue is not self._alone and self._takes_groups[function]:
            count = min(self.functions[function].at_once, math.ceil(len(queue) / idle))
            return [_Group(function, {number: queue.popleft() for number in range(count)})]
        count = min(CHUNK_SIZE, math.ceil(len(queue) / (2 * len(self.workers))))
        calls = [queue.popleft() for _ in range(count)]
        return [_Group(call.function, {number: call}) for number, call in enumerate(calls)]

    def _collect(self) -> None:
        """Wait for and handle messages, dead processes, overdue calls and wake-up bytes."""
        pending = [worker for worker in self.workers if worker.groups or not worker.ready]
        patience_s = max(0.0, min(self._limit_s(worker) - worker.idle_s() for worker in pending)) if pending else None
        readable = wait([self._bell, *(worker.connection for worker in pending)], timeout=patience_s)
        if self._bell in readable:
            self._bell.recv(4096)
        for worker in pending:
            if worker.connection in readable:
                self._receive(worker)
            elif worker.idle_s() > self._limit_s(worker):
                self._handle_exit(worker, patience_s=0.0)

    def _limit_s(self, worker: _Worker) -> float:
        return self._timeout_s + SLACK_S + GRACE_S if worker.ready else START_LIMIT_S

    def _receive(self, worker: _Worker) -> None:
        try:
            message: Message = pickle.loads(worker.connection.recv_bytes(LARGEST_MESSAGE_BYTES))
        except Exception:  # closed, or a function wrote into the pipe: further bytes cannot be decoded
            self._handle_exit(worker, patience_s=GRACE_S)
            return
        worker.progress_at = time.monotonic()
        match message:
            case Ready(groups):
                worker.ready, self._takes_groups, self._failed_starts = True, groups, 0
            case Refused(reason):
                raise Refusal(reason)
            case Retiring():
                self._requeue(worker.calls())
                self._replace(worker, patience_s=GRACE_S)
            case Split():
                self._retry_singly(worker.groups.popleft())
            case Answer(number):
                group = worker.groups[0]
                call = group.calls.pop(number)
                if not group.calls:
                    worker.groups.popleft()
                self._answer(call, message)

    def _handle_exit(self, worker: _Worker, *, patience_s: float) -> None:
        """Replace a process that died or hangs; blame its current example and requeue the others."""
        # This clock starts when the previous answer arrived, a little after the current call began.
        late = worker.idle_s() >= 0.9 * (self._timeout_s if worker.ready else START_LIMIT_S)
        groups = worker.groups
        ended = self._replace(worker, patience_s=patience_s)
        if not worker.ready:
            self._failed_starts += 1
            if self._failed_starts >= START_ATTEMPTS:
                names = ", ".join(function.reference for function in self.functions)
                if late:
                    ended = f"was not done after {START_LIMIT_S:g} s"
                raise RuntimeError(f"reward processes do not survive loading {names}: the last one {ended}")
            return
        blamed = groups.popleft()
        self._requeue(call for group in groups for call in group.calls.values())
        if len(blamed.calls) > 1:
            self._retry_singly(blamed)
            return
        cause: Cause = "timeout" if late else "crash"
        lost = f"no result within {self._timeout_s:g} s; its process was ended" if late else f"its process {ended}"
        for number, call in blamed.calls.items():
            self._answer(call, Answer(number, None, cause, lost))

    def _answer(self, call: RewardCall, answer: Answer) -> None:
        """Deliver an answer, or raise `RewardsFailing` at the limit of consecutive failures."""
        failed = self._failed[call.function] + 1 if answer.cause in FAILURES else 0
        self._failed[call.function] = failed
        if not failed or failed != self._most_failures:
            call.answer.set_result(answer)
            return
        function = self.functions[call.function]
        error = RewardsFailing(
            f"reward {function.name!r} ({function.reference}) failed on {failed} responses in a row and gave no answer "
            f"in between; the last time: {answer.cause}: {answer.detail}. Repair it, or what it depends on, and start "
            "the run again, which goes on from its last checkpoint; rewards.failures_in_a_row says how many are too "
            "many, and 0 never stops a run"
        )
        call.answer.set_exception(error)
        raise error

    def _retry_singly(self, group: _Group) -> None:
        for call in group.calls.values():
            call.alone = True
        self._requeue(group.calls.values())

    def _requeue(self, calls: Iterable[RewardCall]) -> None:
        for call in reversed(list(calls)):
            (self._alone if call.alone else self._queues[call.function]).appendleft(call)

    def _replace(self, worker: _Worker, *, patience_s: float) -> str:
        ended = worker.end(patience_s=patience_s)
        self.workers[self.workers.index(worker)] = self._start()
        return ended

    def _start(self) -> _Worker:
        ours, theirs = Pipe()
        code = f"from jaxrlhf.rewards.worker import main; main({theirs.fileno()}, {os.getpid()})"
        with theirs:
            interpreter = Interpreter(code, fd=theirs.fileno(), output=self._output)
        ours.send((self.functions, self._timeout_s))
        return _Worker(interpreter, ours)

    def _end_workers(self) -> None:
        for worker in self.workers:
            worker.connection.close()
        for worker in self.workers:
            worker.end(patience_s=0.0 if worker.groups else GRACE_S)
        self.workers.clear()
        self._bell.close()
        self._ring.close()
