"""Processes that run reward functions, each call under a wall-clock limit.

Whatever a function does (hang, crash, raise, print, return nonsense), it costs one example and
at most one process, which is killed and replaced. Examples travel in chunks, since most
functions take less time than a message; when a process dies, the example that it was at is
the one to blame and the rest of its chunk goes back to the queue. The module imports
nothing heavy, and neither do the processes.
"""

import math
import os
import pickle
import signal
import subprocess
import sys
import time
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path

from jaxrlhf.rewards.functions import one_line
from jaxrlhf.rewards.protocol import Cause, Example, Failure, Function
from jaxrlhf.rewards.worker import SLACK_S, Answer, Message, Ready, Refused, Split

GROUP_SIZE = 64  # examples in one batched call, and async calls in flight, per process
CHUNK_SIZE = 64  # groups in one message
START_LIMIT_S = 120.0  # for importing the functions' modules
START_ATTEMPTS = 3
GRACE_S = 1.0  # after the limit; a process normally ends itself at the limit
STDERR = 2


@dataclass(frozen=True)
class Outcome:
    """The value of function number `function` on example number `index`, or why there is none."""

    function: int
    index: int
    value: float | None
    failure: Failure | None


@dataclass
class _Group:
    """What one call takes; `indices` shrinks as examples are answered."""

    function: int
    indices: list[int]


@dataclass
class _Worker:
    """A process and what it was given and has not answered; it is at the first of its groups."""

    process: subprocess.Popen
    connection: Connection
    ready: bool = False
    groups: deque[_Group] = field(default_factory=deque)
    progress_at: float = field(default_factory=time.monotonic)

    def idle_s(self) -> float:
        return time.monotonic() - self.progress_at

    def end(self, *, patience_s: float) -> str:
        """Reap the process, by force if it outlives `patience_s`, and what it left behind; says how it ended."""
        self.connection.close()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(patience_s)
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        status = self.process.wait()
        return (
            f"ended by signal {-status} ({signal.strsignal(-status)})" if status < 0 else f"exited with status {status}"
        )


class Pool:
    """Runs reward functions on examples and streams what they return.

    Args:
      functions: Loaded in every process when it starts.
      workers: Number of processes.
      timeout_s: Wall-clock limit of one call.
      output: File that receives what the functions print; None is the standard error stream.

    Raises:
      ValueError: If a function cannot be loaded; the line says which and why.
    """

    def __init__(
        self, functions: Sequence[Function], *, workers: int, timeout_s: float, output: Path | None = None
    ) -> None:
        self._functions = tuple(functions)
        self._timeout_s = timeout_s
        self._output = output
        self._failed_starts = 0
        self._takes_groups: tuple[bool, ...] = ()
        self._queue: deque[_Group] = deque()
        self._workers: list[_Worker] = []
        # Runs at close(), at garbage collection and at exit, whichever comes first.
        self._finalizer = weakref.finalize(self, _end_all, self._workers, os.getpid())
        try:
            self._workers.extend(self._start() for _ in range(workers))
            while not all(worker.ready for worker in self._workers):
                for _ in self._collect():
                    pass
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the processes. A closed pool cannot run again."""
        self._finalizer()

    def __enter__(self) -> "Pool":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, examples: Sequence[Example]) -> Iterator[Outcome]:
        """Every function on every example, in the order of completion.

        Raises:
          RuntimeError: If processes keep dying while they start, if an earlier run is not finished,
            or if the pool is closed.
        """
        if not self._workers:
            raise RuntimeError("this reward pool is closed")
        if self._queue or any(worker.groups for worker in self._workers):
            raise RuntimeError("this reward pool is already running; exhaust or close the earlier run first")
        pickled: dict[int, bytes] = {}
        for index, example in enumerate(examples):
            try:
                pickled[index] = pickle.dumps(example)
            except Exception as error:  # pickle lets through whatever an object's own hooks raise
                for function in range(len(self._functions)):
                    yield self._failed(function, index, "unpicklable", one_line(error))
        try:
            self._queue.extend(self._groups(list(pickled)))
            while self._queue or any(worker.groups for worker in self._workers):
                self._feed(pickled)
                yield from self._collect()
        finally:
            self._queue.clear()
            for worker in [worker for worker in self._workers if worker.groups]:  # the caller stopped listening
                self._replace(worker, patience_s=0.0)

    def _groups(self, indices: list[int]) -> Iterator[_Group]:
        for function, takes_groups in enumerate(self._takes_groups):
            share = math.ceil(len(indices) / len(self._workers))
            size = max(1, min(GROUP_SIZE, share)) if takes_groups else 1
            for start in range(0, len(indices), size):
                yield _Group(function, indices[start : start + size])

    def _feed(self, pickled: dict[int, bytes]) -> None:
        """Give idle processes chunks; they get smaller towards the end so that all finish together."""
        for worker in [worker for worker in self._workers if worker.ready and not worker.groups]:
            count = min(CHUNK_SIZE, math.ceil(len(self._queue) / (2 * len(self._workers))))
            groups = [self._queue.popleft() for _ in range(count)]
            if not groups:
                return
            message = [(group.function, [(index, pickled[index]) for index in group.indices]) for group in groups]
            try:
                worker.connection.send(message)
            except OSError:  # it died while it was idle
                self._queue.extendleft(reversed(groups))
                self._replace(worker, patience_s=GRACE_S)
                continue
            worker.groups.extend(groups)
            worker.progress_at = time.monotonic()

    def _collect(self) -> Iterator[Outcome]:
        """Wait for the next messages, deaths or overdue calls, and deal with them."""
        pending = [worker for worker in self._workers if worker.groups or not worker.ready]
        patience_s = min(self._limit_s(worker) - worker.idle_s() for worker in pending)
        readable = wait([worker.connection for worker in pending], timeout=max(0.0, patience_s))
        for worker in pending:
            if worker.connection in readable:
                yield from self._receive(worker)
            elif worker.idle_s() > self._limit_s(worker):
                yield from self._bury(worker, patience_s=0.0)

    def _limit_s(self, worker: _Worker) -> float:
        return self._timeout_s + SLACK_S + GRACE_S if worker.ready else START_LIMIT_S

    def _receive(self, worker: _Worker) -> Iterator[Outcome]:
        try:
            message: Message = worker.connection.recv()
        except Exception:  # closed, or a function wrote into the pipe: either way nothing more can be understood
            yield from self._bury(worker, patience_s=GRACE_S)
            return
        worker.progress_at = time.monotonic()
        match message:
            case Ready(groups):
                worker.ready, self._takes_groups, self._failed_starts = True, groups, 0
            case Refused(reason):
                raise ValueError(reason)
            case Split():
                self._retry_singly(worker.groups.popleft())
            case Answer(index, value, cause, detail):
                group = worker.groups[0]
                group.indices.remove(index)
                if not group.indices:
                    worker.groups.popleft()
                if cause is None:
                    yield Outcome(group.function, index, value, None)
                else:
                    yield self._failed(group.function, index, cause, detail)

    def _bury(self, worker: _Worker, *, patience_s: float) -> Iterator[Outcome]:
        """Replace a process that died or hangs; blame the example it was at and requeue the others."""
        # The clock here starts when the answer before arrived, a little after the call began.
        late = worker.idle_s() >= 0.9 * self._timeout_s
        ended = self._replace(worker, patience_s=patience_s)
        if not worker.ready:
            self._failed_starts += 1
            if self._failed_starts >= START_ATTEMPTS:
                names = ", ".join(function.reference for function in self._functions)
                raise RuntimeError(f"reward processes do not survive loading {names}: the last one {ended}")
            return
        blamed = worker.groups.popleft()
        self._queue.extendleft(reversed(worker.groups))
        if len(blamed.indices) > 1:
            self._retry_singly(blamed)
        elif late:
            detail = f"no result within {self._timeout_s:g} s; its process was ended"
            yield self._failed(blamed.function, blamed.indices[0], "timeout", detail)
        else:
            yield self._failed(blamed.function, blamed.indices[0], "crash", f"its process {ended}")

    def _retry_singly(self, group: _Group) -> None:
        self._queue.extendleft(_Group(group.function, [index]) for index in reversed(group.indices))

    def _failed(self, function: int, index: int, cause: Cause, detail: str) -> Outcome:
        return Outcome(function, index, None, Failure(self._functions[function].name, index, cause, detail))

    def _replace(self, worker: _Worker, *, patience_s: float) -> str:
        ended = worker.end(patience_s=patience_s)
        self._workers[self._workers.index(worker)] = self._start()
        return ended

    def _start(self) -> _Worker:
        """A new process: a plain interpreter, not a fork or a copy of `__main__`, both of which would carry JAX."""
        ours, theirs = Pipe()
        code = (
            f"import sys; sys.path[:] = {sys.path!r}; "
            f"from jaxrlhf.rewards.worker import main; main({theirs.fileno()}, {os.getpid()})"
        )
        with theirs, open(self._output, "ab") if self._output else nullcontext(STDERR) as sink:
            process = subprocess.Popen(
                [sys.executable, "-u", "-c", code],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=sink,
                env=os.environ | {"JAX_PLATFORMS": "cpu"},  # a function that uses JAX must not take the accelerator
                start_new_session=True,  # signals to the run's group pass it by; it can be killed with its children
            )
        ours.send((self._functions, self._timeout_s))
        return _Worker(process, ours)


def _end_all(workers: list[_Worker], owner: int) -> None:
    if os.getpid() != owner:  # a fork of the process that started them
        return
    for worker in workers:
        worker.connection.close()
    for worker in workers:
        worker.end(patience_s=0.0 if worker.groups else GRACE_S)
    workers.clear()
