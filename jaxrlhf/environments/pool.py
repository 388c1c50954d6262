"""Environments, tools and agent programs of a user's own, thousands at once, in processes under limits.

Every instance of an environment has a process of its own, forked from one that has loaded the user's code: whatever it
does (hang, crash, eat memory, leave threads behind) costs its own episode and no other's, and what it draws from global
generators is the same whoever runs beside it. Tools that are functions have no state, so they share a few processes; a
process that goes down is replaced, and the call that it was at is answered with an error. One thread of the run serves
all processes.
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
from jaxrlhf.environments.family import ProcessFamily
from jaxrlhf.environments.live import LiveEpisodes
from jaxrlhf.environments.protocol import Choice, OpenRequest, Request, RunRequest
from jaxrlhf.episode import EnvironmentFailure, Observation, Opening, Reply

START_LIMIT_S = 300.0  # for importing the user's modules
MOST_FILES = 1 << 16


class EnvironmentPool:
    """Runs the episodes of one or several environments; may be called from any thread, and never waits.

    Futures fail with `EnvironmentFailure`; with `CancelledError` where the episode is dropped, and with `RuntimeError`
    where the pool is closed.

    Args:
      output: File that receives what the user's code prints; None is the standard error stream.

    Raises:
      Refusal: Code of the user's cannot be loaded, or no schema can be made of it; says which and why.

    Attributes:
      closing_failures: Instances that failed to close, by cause; their episodes are not touched by that.
    """

    def __init__(self, choices: Sequence[Choice], output: Path | None = None) -> None:
        self._watch = _Watch(choices, output)
        self.closing_failures = self._watch.episodes.closing_failures
        # Runs at close(), at garbage collection and at exit, whichever comes first.
        self._finalizer = weakref.finalize(self, self._watch.end)

    def close(self) -> None:
        """Close what is open and end all processes."""
        self._finalizer()

    def __enter__(self) -> "EnvironmentPool":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self, episode: int, choice: int, record: Mapping[str, Any], seed: int) -> Future[Opening]:
        """Begin an episode: make an instance and reset it. Tools begin with the record's own prompt."""
        return self._send(partial(self._watch.episodes.start, choice), OpenRequest(episode, record, seed))

    def step(self, episode: int, reply: Reply) -> Future[Observation]:
        """Give a reply to the environment, or make its tool calls."""
        return self._ask(partial(self._watch.episodes.step, episode, reply))

    def finish(self, episode: int) -> Future[float | None]:
        """Final reward, and the end of an episode. The instance is closed afterwards."""
        return self._ask(partial(self._watch.episodes.finish, episode))

    def drop(self, episode: int) -> None:
        """Give an episode up, if there is one; a process that is at its request is ended."""
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
        future.set_running_or_notify_cancel()  # it cannot be cancelled; `drop` is for that
        self._watch.ask(partial(action, future), future)
        return future

    def _send(self, action: Callable[..., None], request: Request) -> Future:
        """Ask for something that a request says, which is pickled on the caller's thread."""
        try:
            return self._ask(partial(action, request, pickle.dumps(request)))
        except Exception as error:  # pickle lets through whatever an object's own hooks raise
            future: Future = Future()
            future.set_exception(EnvironmentFailure("unpicklable", f"the record cannot be sent: {one_line(error)}"))
            return future


class _Watch:
    """The thread that serves the processes: it takes what is asked, feeds them, and deals with what they say."""

    def __init__(self, choices: Sequence[Choice], output: Path | None) -> None:
        _allow_files()
        self._selector = selectors.DefaultSelector()
        self._owner, self._lock = os.getpid(), threading.Lock()  # the lock guards the next two
        self._asked: deque[tuple[Callable[[], None], Future | None]] = deque()
        self._over: BaseException | None = None
        self._bell, self._ring = socketpair()  # what is sent into one end wakes the thread at the other
        self._bell.setblocking(False)
        self._ring.setblocking(False)
        self._selector.register(self._bell, selectors.EVENT_READ)
        self._families: list[ProcessFamily] = []
        try:
            self._families.extend(ProcessFamily(choice, self._selector, output) for choice in choices)
            self._load()
        except BaseException:
            self._end_families()
            raise
        self.episodes = LiveEpisodes(self._families)
        self._thread = threading.Thread(target=self._work, name="environments", daemon=True)
        self._thread.start()

    def ask(self, action: Callable[[], None], future: Future | None = None) -> None:
        """Have an action done on the thread; its errors are the future's."""
        with self._lock:
            if self._over is None:
                self._asked.append((action, future))
            elif future is not None:
                future.set_exception(self._closed())
        self._wake()

    def end(self) -> None:
        """End the thread and the processes."""
        if os.getpid() != self._owner:  # a fork of the process that started them
            return
        with self._lock:
            self._over = self._over or RuntimeError("this pool of environments is closed")
        self._wake()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _wake(self) -> None:
        with suppress(OSError):  # it rings already, or the thread is gone
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
        except BaseException as error:  # whoever waits for an answer gets it
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
    """Let this process have as many files open as the system lets it: a process of an episode takes one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
