"""Groups: a role's worker on a resource pool, called through futures.

A call returns at once. Calls on one pool run one after another, in call order; calls on
different pools run side by side as soon as the futures among their arguments are done. So
moving a role to a pool of its own turns serial work into parallel work, and the controller
function does not change.

This is the local backend: one process drives every device, and a pool is one thread.
"""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from jaxrlhf.tracking import Call


class Timeline:
    """The calls of a step, collected from all lanes."""

    def __init__(self) -> None:
        self._calls: list[Call] = []
        self._lock = threading.Lock()

    def add(self, call: Call) -> None:
        with self._lock:
            self._calls.append(call)

    def take(self) -> list[Call]:
        """The calls since the last call, in order of their end."""
        with self._lock:
            calls, self._calls = self._calls, []
        return calls


def resolve(value: Any) -> Any:
    """The result of a future, waiting for it; any other value as it is."""
    return value.result() if isinstance(value, Future) else value


class Lane:
    """Runs calls one after another, each once the futures among its arguments are done."""

    def __init__(self, name: str, timeline: Timeline) -> None:
        self._threads = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)
        self._timeline = timeline

    def submit(self, role: str, verb: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Future[Any]:
        def run() -> Any:
            ready = [resolve(arg) for arg in args]
            ready_named = {name: resolve(arg) for name, arg in kwargs.items()}
            start = time.perf_counter()
            try:
                return function(*ready, **ready_named)
            except Exception as error:
                error.add_note(f"raised in {role}.{verb}")
                raise
            finally:
                self._timeline.add(Call(role, verb, start, time.perf_counter()))

        return self._threads.submit(run)

    def close(self) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)


class Group:
    """A role. Its verbs are the worker's methods marked with `protocol.verb`.

    Args:
      role: For messages and the timeline.
      worker: Where the methods run.
      lane: Of the pool that the role is placed on.
    """

    def __init__(self, role: str, worker: Any, lane: Lane) -> None:
        self.role, self.worker, self._lane = role, worker, lane

    def __getattr__(self, name: str) -> Callable[..., Future[Any]]:
        method = getattr(self.worker, name, None)
        if method is None or not hasattr(method, "protocol"):
            verbs = sorted(n for n in dir(self.worker) if hasattr(getattr(self.worker, n), "protocol"))
            raise AttributeError(f"{self.role} has no verb {name!r}; it has {verbs}")

        def call(*args: Any, **kwargs: Any) -> Future[Any]:
            return self._lane.submit(self.role, name, method, *args, **kwargs)

        return call
