"""Groups: the roles of a run, called through futures.

A call returns at once. Calls on one pool run one after another, in call order; calls on
different pools run side by side as soon as the futures among their arguments are done. So
moving a role to a pool of its own turns serial work into parallel work, and the controller
function does not change.

What a call returns may live in other processes. A future among the arguments of another call
hands on where its value lies; only `result()` brings the value here.
"""

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from jaxrlhf.tracking import Call


class Remote(ABC):
    """A value in other processes."""

    @abstractmethod
    def load(self) -> Any:
        """The value, brought into this process."""


class Pending(Future):
    """A call's future result."""

    def __init__(self) -> None:
        super().__init__()
        self._loading = threading.Lock()
        self._here: tuple[Any] | None = None

    def where(self) -> Any:
        """The result as the call left it: the value, or the `Remote` that knows where it is. Waits for the call."""
        return super().result()

    def result(self, timeout: float | None = None) -> Any:
        """The value, waiting for it and bringing it here."""
        value = super().result(timeout)
        if not isinstance(value, Remote):
            return value
        with self._loading:
            if self._here is None:
                self._here = (value.load(),)
        return self._here[0]


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


def _ready(value: Any) -> Any:
    """An argument once it is there; what lives elsewhere stays there."""
    if isinstance(value, Pending):
        return value.where()
    return value.result() if isinstance(value, Future) else value


class Lane:
    """Runs calls one after another, each once the futures among its arguments are done."""

    def __init__(self, name: str, timeline: Timeline) -> None:
        self._threads = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)
        self._name, self._timeline = name, timeline

    def submit(self, role: str, verb: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Pending:
        pending = Pending()

        def run() -> None:
            try:
                pending.set_result(self._run(role, verb, function, args, kwargs))
            except BaseException as error:
                pending.set_exception(error)

        def cancelled(done: Future[None]) -> None:
            if done.cancelled():
                pending.cancel()
                pending.set_running_or_notify_cancel()  # wakes whoever waits

        self._threads.submit(run).add_done_callback(cancelled)
        return pending

    def _run(self, role: str, verb: str, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        ready = [_ready(arg) for arg in args]
        ready_named = {name: _ready(arg) for name, arg in kwargs.items()}
        start = time.perf_counter()
        try:
            return function(*ready, **ready_named)
        except Exception as error:
            error.add_note(f"raised in {role}.{verb}")
            raise
        finally:
            self._timeline.add(Call(role, verb, start, time.perf_counter(), self._name))

    def close(self, *, wait: bool = True) -> None:
        """Cancel the calls that wait, and wait for the one that runs."""
        self._threads.shutdown(wait=wait, cancel_futures=True)


class Group:
    """A role. Its verbs are the methods of its worker that are marked with `protocol.verb`.

    Args:
      role: For messages and the timeline.
      verbs: What may be called.
      call: `(role, verb, args, kwargs) -> result`, on the ranks of the group.
      lane: Of the pool that the role is placed on.
    """

    def __init__(
        self, role: str, verbs: Collection[str], call: Callable[[str, str, tuple, dict], Any], lane: Lane
    ) -> None:
        self.role, self._verbs, self._call, self._lane = role, verbs, call, lane

    def __getattr__(self, name: str) -> Callable[..., Pending]:
        if name not in self._verbs:
            raise AttributeError(f"{self.role} has no verb {name!r}; it has {sorted(self._verbs)}")

        def call(*args: Any, **kwargs: Any) -> Pending:
            def on_ranks(*ready: Any, **ready_named: Any) -> Any:
                return self._call(self.role, name, ready, ready_named)

            return self._lane.submit(self.role, name, on_ranks, *args, **kwargs)

        return call


class ActorApart:
    """An actor whose responses another group generates, with copies of its weights on devices of its own.

    The weights are sent before the first generation after they changed. Both groups' calls are
    chained by futures, so the actor's pool is free while the other generates.

    Args:
      actor: Trains.
      rollout: Generates.
    """

    def __init__(self, actor: Group, rollout: Group) -> None:
        self._actor, self._rollout = actor, rollout
        self._versions: Pending | None = None

    def _sent(self) -> Pending:
        """The version of the weights on the rollout's devices, once they are there."""
        if self._versions is None:
            self._versions = self._rollout.load_weights(self._actor.offer_weights(self._rollout.wanted_weights()))
        return self._versions

    def update_actor(self, *args: Any, **kwargs: Any) -> Pending:
        self._versions = None
        return self._actor.update_actor(*args, **kwargs)

    def compile_generation(self, *args: Any, **kwargs: Any) -> Pending:
        return self._rollout.compile_generation(*args, versions=self._sent(), **kwargs)

    def generate_sequences(self, *args: Any, **kwargs: Any) -> Pending:
        return self._rollout.generate_sequences(*args, versions=self._sent(), **kwargs)

    def __getattr__(self, name: str) -> Callable[..., Pending]:
        return getattr(self._actor, name)
