"""Process pool for user-written environments, tools and agent programs, thousands at once and under limits.

Every instance of an environment has its own process, forked from a process that has loaded the user code. A hang, a
crash, a memory leak or leftover threads therefore cost only the instance's own episode, and random numbers from global
generators do not depend on other episodes. Tool functions have no state, so they share a few processes. A process that
dies is replaced, and its current tool call is answered with an error. One thread of the run serves all processes.
"""

import os
import pickle
import resource
import selectors
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path
from socket import socketpair
from typing import Any

from jaxrlhf.config import Refusal
from jaxrlhf.config.named_functions import one_line
from jaxrlhf.environments.family import WorkerGroup
from jaxrlhf.environments.live import LiveEpisodes
from jaxrlhf.environments.protocol import Choice, OpenRequest, Request, RunRequest
from jaxrlhf.episode import EnvironmentFailure, Observation, Opening, Reply

START_LIMIT_S = 300.0  # for importing the user's modules
MOST_FILES = 1 << 16


class EnvironmentPool:
    """Pool that runs the episodes of one or several environments; thread-safe, and its methods return at once.

    Futures fail with `EnvironmentFailure`, with `CancelledError` if the episode is dropped, and with `RuntimeError` if
    the pool is closed.

    Args:
      output: File that receives the output of the user code; None is the standard error stream.

    Raises:
      Refusal: User code cannot be loaded, or no schema can be made of a tool; the message says which and why.

    Attributes:
      closing_failures: Number of instances that failed to close, by cause; the results of their episodes stay valid.
    """

    def __init__(self, choices: Sequence[Choice], output: Path | None = None) -> None:
        self._watch = _Watch(choices, output)
        self.closing_failures = self._watch.episodes.closing_failures
        # Runs at close(), at garbage collection and at exit, whichever comes first.
        self._finalizer = weakref.finalize(self, self._watch.end)

    def close(self) -> None:
        """Close all instances and end all processes."""
        self._finalizer()

    def __enter__(self) -> "EnvironmentPool":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self, episode: int, choice: int, record: Mapping[str, Any], seed: int) -> Future[Opening]:
        """Start an episode: make an instance and reset it. Episodes of `Tools` start with the record's prompt."""
        return self._send(partial(self._watch.episodes.start, choice), OpenRequest(episode, record, seed))

    def step(self, episode: int, reply: Reply) -> Future[Observation]:
        """Pass a reply to the environment, or make the reply's tool calls."""
        return self._ask(partial(self._watch.episodes.step, episode, reply))

    def finish(self, episode: int) -> Future[float | None]:
        """End an episode and return its final reward. The instance is closed after that."""
        return self._ask(partial(self._watch.episodes.finish, episode))

    def drop(self, episode: int) -> None:
        """Drop an episode, if it is open; a process that works at its request is killed."""
        self._watch.ask(partial(self._watch.episodes.drop, episode))

    def run_agent(
        self, episode: int, choice: int, record: Mapping[str, Any], seed: int, base_url: str, api_key: str
    ) -> Future[float | None]:
        """Run an agent program to its end."""
        return self._send(
            partial(self._watch.episodes.run_agent, choice), RunRequest(episode, record, seed, base_url, api_key)
        )

    def _ask(self, action: Callable[[Future], None]) -> Future:
        future: Future = Future()
        future.set_running_or_notify_cancel()  # makes `cancel` fail; callers use `drop` instead
        self._watch.ask(partial(action, future), future)
        return future

    def _send(self, action: Callable[..., None], request: Request) -> Future:
        """Pickle a request on the caller's thread and queue an action with it."""
        try:
            return self._ask(partial(action, request, pickle.dumps(request)))
        except Exception as error:  # an object's pickling hooks may raise any error
            future: Future = Future()
            future.set_exception(EnvironmentFailure("unpicklable", f"the record cannot be sent: {one_line(error)}"))
            return future


class _Watch:
    """Thread that serves the processes: runs queued actions, sends requests, and handles answers."""

    def __init__(self, choices: Sequence[Choice], output: Path | None) -> None:
        _allow_files()
        self._selector = selectors.DefaultSelector()
        self._owner, self._lock = os.getpid(), threading.Lock()  # the lock guards `_asked` and `_over`
        self._asked: deque[tuple[Callable[[], None], Future | None]] = deque()
        self._over: BaseException | None = None
        self._bell, self._ring = socketpair()  # a byte sent into `_ring` wakes the thread, which waits at `_bell`
        self._bell.setblocking(False)
        self._ring.setblocking(False)
        self._selector.register(self._bell, selectors.EVENT_READ)
        self._families: list[WorkerGroup] = []
        try:
            self._families.extend(WorkerGroup(choice, self._selector, output) for choice in choices)
            self._load()
        except BaseException:
            self._end_families()
            raise
        self.episodes = LiveEpisodes(self._families)
        self._thread = threading.Thread(target=self._work, name="environments", daemon=True)
        self._thread.start()

    def ask(self, action: Callable[[], None], future: Future | None = None) -> None:
        """Queue an action for the thread; an error of the action becomes the future's error."""
        with self._lock:
            if self._over is None:
                self._asked.append((action, future))
            elif future is not None:
                future.set_exception(self._closed())
        self._wake()

    def end(self) -> None:
        """End the thread and the processes."""
        if os.getpid() != self._owner:  # this process is a fork of the pool's owner
            return
        with self._lock:
            self._over = self._over or RuntimeError("this pool of environments is closed")
        self._wake()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _wake(self) -> None:
        with suppress(OSError):  # the socket buffer is full, so the thread wakes anyway, or the thread is gone
            self._ring.send(b"\0")

    def _load(self) -> None:
        end = time.monotonic() + START_LIMIT_S
        while loading := [family for family in self._families if not family.loaded]:
            if time.monotonic() > end:
                names = ", ".join(family.name for family in loading)
                raise Refusal(f"{names}: loading takes longer than {START_LIMIT_S:g} s; do less when it is imported")
            self._select(0.1)

    def _work(self) -> None:
        try:
            while self._over is None:
                self._do_asked()
                for family in self._families:
                    family.feed()
                end = min((family.deadline_s() for family in self._families), default=float("inf"))
                now = time.monotonic()
                self._select(None if end == float("inf") else max(0.0, end - now))
                for family in self._families:
                    family.kill_late(time.monotonic())
        except BaseException as error:  # all open futures receive this error
            with self._lock:
                self._over = error
        finally:
            self._do_asked(over=True)
            self.episodes.fail(self._closed())
            self._end_families()

    def _do_asked(self, *, over: bool = False) -> None:
        while self._asked:
            action, future = self._asked.popleft()
            try:
                if over:
                    raise self._closed()
                action()
            except Exception as error:
                if future is not None and not future.done():
                    future.set_exception(error)

    def _select(self, timeout_s: float | None) -> None:
        for key, events in self._selector.select(timeout_s):
            if key.data is None:
                self._bell.recv(4096)
            else:
                family, process = key.data
                family.ready(process, events)

    def _closed(self) -> BaseException:
        error = RuntimeError(f"environments cannot be asked: {self._over}")
        error.__cause__ = self._over
        return error

    def _end_families(self) -> None:
        for family in self._families:
            family.close()
        for family in self._families:
            family.end()
        self._selector.close()
        self._bell.close()
        self._ring.close()


def _allow_files() -> None:
    """Raise this process's limit of open files as far as the system allows: each worker process takes one file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
