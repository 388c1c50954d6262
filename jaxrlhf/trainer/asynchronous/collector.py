"""Collector of a schedule: runs collections one after another, in a thread if separate devices generate."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

from jaxrlhf.trainer.schedule import wait_for_responses

Collected = TypeVar("Collected")


class Collector:
    """Queue of collections, run in the order of submission.

    Args:
      apart: True collects in a thread, because separate devices generate; False collects at once in the caller.
    """

    def __init__(self, *, apart: bool) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="collect") if apart else None
        self._turn, self._may_start = threading.Lock(), threading.Event()
        self._may_start.set()

    def submit(self, collect: Callable[[], Collected]) -> "Future[Collected]":
        """Submit a collection. The future is done once the responses exist; their scores may still be pending."""
        if self._thread is not None:
            return self._thread.submit(self._in_turn, collect)
        future: Future[Collected] = Future()
        future.set_result(collect())
        return future

    def _in_turn(self, collect: Callable[[], Collected]) -> Collected:
        self._may_start.wait()
        with self._turn:
            collected = collect()
            wait_for_responses(collected)
        return collected

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Wait for the running collection, then start no collection within the block."""
        self._may_start.clear()
        try:
            with self._turn:
                yield
        finally:
            self._may_start.set()

    def close(self) -> None:
        """Cancel the waiting collections."""
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)
