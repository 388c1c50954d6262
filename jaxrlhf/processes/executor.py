"""Executor of user code: one thread of the run that serves the worker processes of one or several pieces of code."""

import os
import selectors
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from socket import socketpair
from typing import Protocol, Self

from jaxrlhf.config import Refusal
from jaxrlhf.processes.jobs import Code
from jaxrlhf.processes.workers import WorkerGroup

START_LIMIT_S = 300.0  # for importing the user's modules


class Client(Protocol):
    """Source of the executor's jobs. All methods run on the executor's thread."""

    def feed(self) -> None:
        """Submit jobs that are due, if any; called before jobs are sent to processes."""

    def over(self, error: BaseException) -> None:
        """Fail the calls that are not jobs yet, because the executor has ended."""


class Executor:
    """Thread that serves the processes: runs queued actions, sends jobs, and handles answers.

    Args:
      codes: Pieces of user code, each with processes that load it.
      output: File that receives the output of the user code; None is the standard error stream.
      name: Name of the code in messages, a plural.

    Attributes:
      groups: Processes of each piece of code.
      error: Error that calls fail with because the executor has ended; None before that.

    Raises:
      Refusal: User code cannot be loaded; the message says which and why.
    """

    def __init__(self, codes: Sequence[Code], output: Path | None, *, name: str) -> None:
        self._name, self._selector = name, selectors.DefaultSelector()
        self._owner, self._lock = os.getpid(), threading.Lock()  # the lock guards `_asked` and `error`
        self._asked: deque[tuple[Callable[[], None], Callable[[BaseException], None]]] = deque()
        self.error: BaseException | None = None
        self._bell, self._ring = socketpair()  # a byte sent into `_ring` wakes the thread, which waits at `_bell`
        self._bell.setblocking(False)
        self._ring.setblocking(False)
        self._selector.register(self._bell, selectors.EVENT_READ)
        self._thread: threading.Thread | None = None
        self.groups: list[WorkerGroup] = []
        try:
            self.groups.extend(WorkerGroup(code, self._selector, output) for code in codes)
            self._load()
        except BaseException:
            self._end_groups()
            raise

    def _load(self) -> None:
        end = time.monotonic() + START_LIMIT_S
        while loading := [group.code.name for group in self.groups if group.about is None]:
            if time.monotonic() > end:
                raise Refusal(
                    f"{', '.join(loading)}: loading takes longer than {START_LIMIT_S:g} s; do less at its import"
                )
            self._select(0.1)

    def start(self, client: Client) -> None:
        """Start the thread."""
        self._thread = threading.Thread(target=self._work, args=(client,), name=self._name, daemon=True)
        self._thread.start()

    def ask(self, action: Callable[[], None], failed: Callable[[BaseException], None] = lambda error: None) -> None:
        """Queue an action for the thread; `failed` receives the action's error, or the error of an ended executor."""
        with self._lock:
            error = self.error
            if error is None:
                self._asked.append((action, failed))
        if error is not None:
            failed(error)
        self._wake()

    def end(self) -> None:
        """End the thread and the processes; open calls fail."""
        if os.getpid() != self._owner:  # this process is a fork of the executor's owner
            return
        with self._lock:
            self.error = self.error or RuntimeError(f"this pool of {self._name} is closed")
        self._wake()
        if self._thread is None:
            self._end_groups()
        elif threading.current_thread() is not self._thread:  # else a finalizer runs on the thread, which ends anyway
            self._thread.join()

    def _wake(self) -> None:
        with suppress(OSError):  # the socket buffer is full, so the thread wakes anyway, or the thread is gone
            self._ring.send(b"\0")

    def _work(self, client: Client) -> None:
        try:
            while self.error is None:
                self._do_asked()
                client.feed()
                for group in self.groups:
                    group.feed()
                end = min(group.deadline_s() for group in self.groups)
                self._select(None if end == float("inf") else max(0.0, end - time.monotonic()))
                for group in self.groups:
                    group.kill_late(time.monotonic())
        except BaseException as error:  # all open calls receive this error
            found = error if isinstance(error, RuntimeError) else RuntimeError(f"{self._name} cannot run: {error}")
            found.__cause__ = error if found is not error else error.__cause__
            with self._lock:
                self.error = found
        finally:
            assert self.error is not None
            for _, failed in self._asked:
                failed(self.error)
            for job in [job for group in self.groups for job in group.jobs()]:
                job.over(self.error)
            client.over(self.error)
            self._end_groups()

    def _do_asked(self) -> None:
        while self._asked:
            action, failed = self._asked.popleft()
            try:
                action()
            except Exception as error:
                failed(error)

    def _select(self, timeout_s: float | None) -> None:
        for key, events in self._selector.select(timeout_s):
            if key.data is None:
                self._bell.recv(4096)
            else:
                group, source = key.data
                group.ready(source, events)

    def _end_groups(self) -> None:
        for group in self.groups:
            group.close()
        for group in self.groups:
            group.end()
        self._selector.close()
        self._bell.close()
        self._ring.close()


class ProcessPool:
    """Context manager that ends an executor at `close`, at garbage collection and at exit, whichever comes first.

    The executor's thread must not refer to the pool.
    """

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._finalizer = weakref.finalize(self, executor.end)

    def close(self) -> None:
        """Close all instances and end all processes. A closed pool cannot run again."""
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
