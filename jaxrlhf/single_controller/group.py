"""Worker groups: the roles of a run, whose methods the controller calls through futures.

A call returns at once. Calls on one pool run one after another, in call order; calls on
different pools run side by side as soon as the futures among their arguments are done. So
moving a role to a pool of its own turns serial work into parallel work, and the dataflow
does not change.

A call's result may live in other processes. A future among the arguments of another call
hands on where its value lies; only `result()` brings the value here.
"""

import itertools
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from jaxrlhf.batching.transfer_protocol import RemoteValue, worker_methods
from jaxrlhf.tracking import ON_HOST, Call
from jaxrlhf.workers.generation.generates import Generates

Value = TypeVar("Value")


class Pending(Future[Value]):
    """A call's future result."""

    def __init__(self) -> None:
        super().__init__()
        self._loading = threading.Lock()
        self._here: tuple[Value] | None = None

    def where(self) -> Value | RemoteValue:
        """The value, or the `RemoteValue` that knows where it is, unless it was brought here; waits for the call."""
        return super().result() if self._here is None else self._here[0]

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
        self._running: dict[str, float] = {}
        self._ended_s: dict[str, float] = {}
        self._lock = threading.Lock()

    def began(self, lane: str, start_s: float) -> None:
        """A call begins on a lane, which has one at a time."""
        with self._lock:
            self._running[lane] = start_s

    def add(self, call: Call) -> None:
        """A call ended."""
        with self._lock:
            self._calls.append(call)
            self._running.pop(call.lane, None)
            self._ended_s[call.lane] = self._ended_s.get(call.lane, 0.0) + call.end_s - call.start_s

    def busy_s(self) -> dict[str, float]:
        """Seconds so far in which a call ran, by lane of devices."""
        with self._lock:
            now = time.perf_counter()
            lanes = {*self._ended_s, *self._running} - {ON_HOST}
            return {lane: self._ended_s.get(lane, 0.0) + now - self._running.get(lane, now) for lane in sorted(lanes)}

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
                self._timeline.began(self._name, start)
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
    """

    def __init__(self, role: str, methods: Collection[str], call: RunOnRanks, queue: DeviceQueue) -> None:
        self.role, self._methods, self._call, self._queue = role, methods, call, queue

    def __getattr__(self, name: str) -> Callable[..., Pending[Any]]:
        if name not in self._methods:
            raise AttributeError(f"{self.role} has no worker method {name!r}; it has {sorted(self._methods)}")
        return partial(self._queue.submit, self._call, self.role, name)


_GENERATING = worker_methods(Generates).keys()


class GeneratesElsewhere(ABC):
    """An actor whose methods that generate are those of another group, and all others those of `_trains`."""

    _rollout: Group
    _trains: Any

    @abstractmethod
    def _sent(self) -> Pending[Any]:
        """Version of the weights to generate with, once they are on the rollout's devices."""

    def __getattr__(self, name: str) -> Callable[..., Pending[Any]]:
        if name in _GENERATING:
            return lambda *args, **kwargs: getattr(self._rollout, name)(*args, versions=self._sent(), **kwargs)
        return getattr(self._trains, name)


class ActorApart(GeneratesElsewhere):
    """An actor whose responses another group generates, with copies of its weights on devices of its own.

    The weights are sent before the first generation after they changed. Both groups' calls are
    chained by futures, so the actor's pool is free while the other generates.

    Args:
      fetching: Gives the same group as it is launched now; its calls run beside the others.
    """

    def __init__(self, actor: Group, rollout: Group, fetching: Callable[[], Group]) -> None:
        self._trains, self._rollout, self._fetching = actor, rollout, fetching
        self._fetches = itertools.count()
        self._newest: Pending[Any] | None = None
        self._there: Pending[Any] | None = None
        self._wanted: tuple[Any, Group] | None = None
        self._asked: list[Any] = []
        self._waiting, self.launches = 0, 1
        self._order = threading.Lock()  # an update is before or after an offer

    def update_actor(self, *args: object, **kwargs: object) -> Pending[Any]:
        return self._updated(self._trains.update_actor, *args, **kwargs)

    def update_by_gradients(self, *args: object, **kwargs: object) -> Pending[Any]:
        return self._updated(self._trains.update_by_gradients, *args, **kwargs)

    def _updated(self, update: Callable[..., Pending[Any]], *args: object, **kwargs: object) -> Pending[Any]:
        with self._order:
            self._newest = None
            return update(*args, **kwargs)

    def as_of_now(self, *, waiting: int) -> "ActorAsOf":
        """The actor that generates with the weights of this moment, whatever is updated before it does.

        They are fetched at once, while the group that generates may be drawing with those before.

        Args:
          waiting: Most of these that may exist and have not begun to generate; a copy of the weights waits for each.
        """
        self._waiting = 2 * waiting + 1  # between two of these the newest weights may be offered, for an evaluation
        if self._there is None:
            self._sent()
        launches, known = self.launches, self._wanted
        if known is None:  # from the second time on always the same, so that no offer waits for generation
            fetching = self._fetching()
            self._wanted = known = self._rollout.wanted_weights().result(), fetching
        wanted, fetching = known
        fetched = fetching.fetch_weights(self._offer(wanted), number=next(self._fetches))
        return ActorAsOf(self, self._rollout, fetched, launches)

    def _offer(self, wanted: Any) -> Pending[Any]:
        if wanted not in self._asked:
            self._asked.append(wanted)
        return self._trains.offer_weights(wanted, waiting=self._waiting)

    def send_again(self) -> None:
        """Send the newest weights, all of them, to a group that was launched anew and has none, nor its former size."""
        self.launches += 1
        self._newest = self._there = self._wanted = None
        asked, self._asked = self._asked, []
        for wanted in asked:  # by processes that are gone; nobody comes for what was offered to them
            self._trains.withdraw_weights(wanted)
        self._sent()

    def load(self, fetched: Pending[Any]) -> Pending[Any]:
        """Have weights that were fetched on the rollout's devices; returns their version."""
        self._there = self._rollout.load_fetched(fetched)
        return self._there

    def _sent(self) -> Pending[Any]:
        """Version of the newest weights, once they are on the rollout's devices."""
        if self._newest is None or self._newest is not self._there:
            # Brought here: what lies on a host that dies would take down the pool that comes to read it.
            wanted = self._rollout.wanted_weights().result()
            with self._order:
                self._newest = self._there = sent = self._rollout.load_weights(self._offer(wanted))
            return sent
        return self._newest


class ActorAsOf(GeneratesElsewhere):
    """An actor as of one moment: it generates with the weights of then, and is the actor of now in all else.

    Nothing else may have its devices generate between its first call and its last.

    Where the group that generates was launched anew meanwhile, it has the newest weights at its first call.

    Args:
      fetched: Number of the weights on the group's hosts, where they wait for the first call.
      launches: Launches of the group as they were asked for.
    """

    def __init__(self, apart: ActorApart, rollout: Group, fetched: Pending[Any], launches: int) -> None:
        self._trains, self._rollout = apart, rollout
        self._fetched, self._launches = fetched, launches
        self._versions: Pending[Any] | None = None

    def _sent(self) -> Pending[Any]:
        if self._versions is None:
            there = self._launches == self._trains.launches
            self._versions = self._trains.load(self._fetched) if there else self._trains._sent()
        return self._versions
