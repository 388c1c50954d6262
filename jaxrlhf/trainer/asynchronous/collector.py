"""Collector: makes a schedule's collections, one after another, beside the learning where other devices generate."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

from jaxrlhf.trainer.schedule import wait_for_responses

Collected = TypeVar("Collected")


class Collector:
    """Makes collections in the order in which they are asked for.

    Args:
      apart: Collect in a thread, since the devices that generate are not those that learn; else at once.
    """

    def __init__(self, *, apart: bool) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="collect") if apart else None
        self._turn, self._may_begin = threading.Lock(), threading.Event()
        self._may_begin.set()

    def submit(self, collect: Callable[[], Collected]) -> "Future[Collected]":
        """Ask for a collection. It is done once its responses are there; their scores may be on their way."""
        if self._thread is not None:
            return self._thread.submit(self._in_turn, collect)
        future: Future[Collected] = Future()
        future.set_result(collect())
        return future

    def _in_turn(self, collect: Callable[[], Collected]) -> Collected:
        self._may_begin.wait()
        with self._turn:
            collected = collect()
            wait_for_responses(collected)
        return collected

    @contextmanager
    def resting(self) -> Iterator[None]:
        """Begin no collection within the block, which begins when the one under way is done."""
        self._may_begin.clear()
        try:
            with self._turn:
                yield
        finally:
            self._may_begin.set()

    def close(self) -> None:
        """Begin none of those that wait."""
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)
