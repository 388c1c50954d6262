"""Worker groups: the roles of a run, whose methods the controller calls through futures.

A call returns at once. Calls on one pool run one after another, in call order; calls on
different pools run side by side as soon as the futures among their arguments are done. So
moving a role to a pool of its own turns serial work into parallel work, and the dataflow
does not change.

A call's result may live in other processes. A future among the arguments of another call
hands on where its value lies; only `result()` brings the value here.
"""

import threading
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from jaxrlhf.batching.transfer_protocol import RemoteValue
from jaxrlhf.tracking import Call

Value = TypeVar("Value")


class Pending(Future[Value]):
    """A call's future result."""

    def __init__(self) -> None:
        super().__init__()
        self._loading = threading.Lock()
        self._here: tuple[Value] | None = None

    def where(self) -> Value | RemoteValue:
        """The value, or the `RemoteValue` that knows where it is; waits for the call."""
        return super().result()

    def result(self, timeout: float | None = None) -> Value:
        """The value, waiting for it and bringing it here."""
        value = super().result(timeout)
        if not isinstance(value, RemoteValue):
            return value
        with self._loading:
            if self._here is None:
                self._here = (value.load(),)
        return self._here[0]


class Timeline:
    """The calls of a step on all device queues."""

    def __init__(self) -> None:
        self._calls: list[Call] = []
        self._lock = threading.Lock()

    def add(self, call: Call) -> None:
        with self._lock:
            self._calls.append(call)

    def take(self) -> list[Call]:
        """The calls added since the last `take`, in order of their end."""
        with self._lock:
            calls, self._calls = self._calls, []
        return calls


RunOnRanks = Callable[[str, str, tuple[object, ...], Mapping[str, object]], object]
"""`(role, method, args, kwargs) -> result`, on all ranks of a group."""


class DeviceQueue:
    """Queue of the calls on one pool's devices: they run one after another, each once its arguments are there."""

    def __init__(self, name: str, timeline: Timeline) -> None:
        self._threads = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)
        self._name, self._timeline = name, timeline

    def submit(self, function: RunOnRanks, role: str, method: str, *args: object, **kwargs: object) -> Pending[Any]:
        """Append a call of a role's method."""
        pending: Pending[Any] = Pending()

        def run() -> None:
            try:
                ready = tuple(map(_awaited, args))
                named = {name: _awaited(arg) for name, arg in kwargs.items()}
                start = time.perf_counter()
                try:
                    value = function(role, method, ready, named)
                except Exception as error:
                    error.add_note(f"raised in {role}.{method}")
                    raise
                finally:
                    self._timeline.add(Call(role, method, start, time.perf_counter(), self._name))
            except BaseException as error:
                pending.set_exception(error)
            else:
                pending.set_result(value)

        def cancelled(done: Future[None]) -> None:
            if done.cancelled():
                pending.cancel()
                pending.set_running_or_notify_cancel()  # wakes whoever waits

        self._threads.submit(run).add_done_callback(cancelled)
        return pending

    def close(self, *, wait: bool = True) -> None:
        """Cancel the calls that wait, and wait for the one that runs."""
        self._threads.shutdown(wait=wait, cancel_futures=True)


def _awaited(value: object) -> object:
    """An argument once it is there; values of other processes stay there."""
    if isinstance(value, Pending):
        return value.where()
    return value.result() if isinstance(value, Future) else value


class Group:
    """The workers of a role on all ranks of its pool. It has the worker methods that their class marks.

    Args:
      role: Name for messages and the timeline.
      methods: Names of the methods.
      call: Runs a method on the ranks.
      queue: The pool's.
    """

    def __init__(self, role: str, methods: Collection[str], call: RunOnRanks, queue: DeviceQueue) -> None:
        self.role, self._methods, self._call, self._queue = role, methods, call, queue

    def __getattr__(self, name: str) -> Callable[..., Pending[Any]]:
        if name not in self._methods:
            raise AttributeError(f"{self.role} has no worker method {name!r}; it has {sorted(self._methods)}")
        return partial(self._queue.submit, self._call, self.role, name)


class ActorApart:
    """An actor whose responses another group generates, with copies of its weights on devices of its own.

    The weights are sent before the first generation after they changed. Both groups' calls are
    chained by futures, so the actor's pool is free while the other generates.

    Args:
      actor: The group that trains.
      rollout: The group that generates.
    """

    def __init__(self, actor: Group, rollout: Group) -> None:
        self._actor, self._rollout = actor, rollout
        self._versions: Pending[Any] | None = None

    def update_actor(self, *args: object, **kwargs: object) -> Pending[Any]:
        self._versions = None
        return self._actor.update_actor(*args, **kwargs)

    def compile_generation(self, *args: object, **kwargs: object) -> Pending[Any]:
        return self._rollout.compile_generation(*args, versions=self._sent(), **kwargs)

    def generate_sequences(self, *args: object, **kwargs: object) -> Pending[Any]:
        return self._rollout.generate_sequences(*args, versions=self._sent(), **kwargs)

    def run_episodes(self, *args: object, **kwargs: object) -> Pending[Any]:
        return self._rollout.run_episodes(*args, versions=self._sent(), **kwargs)

    def __getattr__(self, name: str) -> Callable[..., Pending[Any]]:
        return getattr(self._actor, name)

    def _sent(self) -> Pending[Any]:
        """Version of the weights on the rollout's devices, once they are there."""
        if self._versions is None:
            self._versions = self._rollout.load_weights(self._actor.offer_weights(self._rollout.wanted_weights()))
        return self._versions
