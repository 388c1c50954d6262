"""Worker groups: the roles of a run, whose methods the controller calls asynchronously.

A call returns a future at once. Calls on one pool run one after another, in call order. Calls on different pools run in
parallel as soon as the futures among their arguments are done. Moving a role to a separate pool therefore turns serial
work into parallel work, and the dataflow does not change.

The result of a call may be stored in other processes. A future passed to another call passes on only the location of
its value; `result()` brings the value to this process.
"""

import itertools
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, TypeVar

from jaxrlhf.batching.transfer_protocol import RemoteValue, worker_methods
from jaxrlhf.tracking import ON_HOST, Call
from jaxrlhf.workers.generation.generates import GenerationWorker

Value = TypeVar("Value")


class Pending(Future[Value]):
    """Future of a call's result.

    Attributes:
      call: Role and verb of the call, for messages.
    """

    def __init__(self, call: str = "") -> None:
        super().__init__()
        self.call = call
        self._loading = threading.Lock()
        self._loaded: tuple[Value] | None = None

    def value_or_handle(self) -> Value | RemoteValue:
        """Wait for the call; return the value, or its `RemoteValue` if the value is not in this process yet."""
        return super().result() if self._loaded is None else self._loaded[0]

    def result(self, timeout: float | None = None) -> Value:
        """Wait for the call, bring its value to this process and return the value."""
        value = super().result(timeout)
        if not isinstance(value, RemoteValue):
            return value
        with self._loading:
            if self._loaded is None:
                self._loaded = (value.load(),)
        return self._loaded[0]


@dataclass(eq=False)
class OpenCall:
    """Call that has not ended.

    Attributes:
      lane: Queue that the call is in.
      state: `queued` behind other calls, `waits` for the result of `waits_for`, or `runs`.
      since_s: Start of this state, in `time.perf_counter` seconds.
    """

    role: str
    verb: str
    lane: str
    state: Literal["queued", "waits", "runs"] = "queued"
    waits_for: str = ""
    since_s: float = field(default_factory=time.perf_counter)

    def set_state(self, state: Literal["waits", "runs"], waits_for: str = "") -> None:
        self.state, self.waits_for, self.since_s = state, waits_for, time.perf_counter()


class Timeline:
    """Timeline of calls on all device queues; the queue of a pool's devices is a lane.

    Attributes:
      changed_s: Time at which a call was last submitted, started or ended, in `time.perf_counter` seconds.
    """

    def __init__(self) -> None:
        self.changed_s = time.perf_counter()
        self._open: list[OpenCall] = []
        self._calls: list[Call] = []
        self._running: dict[str, float] = {}
        self._ended_s: dict[str, float] = {}
        self._lock = threading.Lock()

    def submitted(self, role: str, verb: str, lane: str) -> OpenCall:
        """Record a call that was put into a queue."""
        call = OpenCall(role, verb, lane)
        with self._lock:
            self._open.append(call)
            self.changed_s = call.since_s
        return call

    def ended(self, call: OpenCall) -> None:
        """Record that a call has ended, or was cancelled."""
        with self._lock:
            if call in self._open:
                self._open.remove(call)
            self.changed_s = time.perf_counter()

    def open_calls(self) -> list[OpenCall]:
        """Return copies of the calls that have not ended, in the order of submission."""
        with self._lock:
            return [replace(call) for call in self._open]

    def started(self, lane: str, start_s: float) -> None:
        """Record the start of a call on a lane; a lane runs one call at a time."""
        with self._lock:
            self._running[lane] = start_s
            self.changed_s = start_s

    def add(self, call: Call) -> None:
        """Record a finished call."""
        with self._lock:
            self._calls.append(call)
            self._running.pop(call.lane, None)
            self._ended_s[call.lane] = self._ended_s.get(call.lane, 0.0) + call.end_s - call.start_s

    def busy_s(self) -> dict[str, float]:
        """Return the total seconds in which a call ran, by device lane."""
        with self._lock:
            now = time.perf_counter()
            lanes = {*self._ended_s, *self._running} - {ON_HOST}
            return {lane: self._ended_s.get(lane, 0.0) + now - self._running.get(lane, now) for lane in sorted(lanes)}

    def take(self) -> list[Call]:
        """Return the calls added since the last `take`, in the order of their end."""
        with self._lock:
            calls, self._calls = self._calls, []
        return calls


RunOnRanks = Callable[[str, str, tuple[object, ...], Mapping[str, object]], object]
"""Function `(role, method, args, kwargs) -> result` that runs a method on all ranks of a group."""


class DeviceQueue:
    """Queue of the calls on one pool's devices: calls run one after another, each once its arguments are available."""

    def __init__(self, name: str, timeline: Timeline) -> None:
        self._threads = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)
        self._name, self._timeline = name, timeline

    def submit(self, function: RunOnRanks, role: str, method: str, *args: object, **kwargs: object) -> Pending[Any]:
        """Append a call of a role's method; return the future of its result."""
        pending: Pending[Any] = Pending(f"{role}.{method}")
        call = self._timeline.submitted(role, method, self._name)

        def run() -> None:
            try:
                ready = tuple(_awaited(arg, call) for arg in args)
                named = {name: _awaited(arg, call) for name, arg in kwargs.items()}
                start = time.perf_counter()
                call.set_state("runs")
                self._timeline.started(self._name, start)
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
            finally:
                self._timeline.ended(call)

        def cancelled(done: Future[None]) -> None:
            if done.cancelled():
                self._timeline.ended(call)
                pending.cancel()
                pending.set_running_or_notify_cancel()  # wakes waiting threads

        self._threads.submit(run).add_done_callback(cancelled)
        return pending

    def close(self, *, wait: bool = True) -> None:
        """Cancel the waiting calls and, with `wait`, wait for the running call."""
        self._threads.shutdown(wait=wait, cancel_futures=True)


def _awaited(value: object, call: OpenCall) -> object:
    """Wait for an argument of a call if it is a future; values in other processes stay there."""
    if not isinstance(value, Future):
        return value
    if not value.done():
        call.set_state("waits", value.call if isinstance(value, Pending) else "a value of the controller")
    return value.value_or_handle() if isinstance(value, Pending) else value.result()


class Group:
    """Group of a role's workers on all ranks of a pool; has the worker methods that the worker class marks.

    Args:
      role: Name of the role, for messages and the timeline.
      methods: Names of the worker methods.
    """

    def __init__(self, role: str, methods: Collection[str], call: RunOnRanks, queue: DeviceQueue) -> None:
        self.role, self._methods, self._call, self._queue = role, methods, call, queue

    def __getattr__(self, name: str) -> Callable[..., Pending[Any]]:
        if name not in self._methods:
            raise AttributeError(f"{self.role} has no worker method {name!r}; it has {sorted(self._methods)}")
        return partial(self._queue.submit, self._call, self.role, name)


_GENERATION_METHODS = worker_methods(GenerationWorker).keys()


class DelegatesGeneration(ABC):
    """Actor that calls the rollout group to generate, and `_actor` for all other methods."""

    _rollout: Group
    _actor: Any

    @abstractmethod
    def _version(self) -> Pending[Any]:
        """Return the version of the weights to generate with, as a future that waits for their transfer."""

    def __getattr__(self, name: str) -> Callable[..., Pending[Any]]:
        if name in _GENERATION_METHODS:
            return lambda *args, **kwargs: getattr(self._rollout, name)(*args, versions=self._version(), **kwargs)
        return getattr(self._actor, name)


class ActorWithRolloutPool(DelegatesGeneration):
    """Actor whose responses a rollout group generates on a separate pool, with copies of the actor's weights.

    Changed weights are sent before the next generation. The calls of both groups are chained by futures, so the actor's
    pool is free while the rollout group generates.

    Args:
      fetch_group: Returns the rollout group on its current processes, with a separate queue: the group's calls run
        concurrently with generation.
    """

    def __init__(self, actor: Group, rollout: Group, fetch_group: Callable[[], Group]) -> None:
        self._actor, self._rollout, self._fetch_group = actor, rollout, fetch_group
        self._fetches = itertools.count()
        self._sent: Pending[Any] | None = None  # version of the newest weights; None after an update
        self._loaded: Pending[Any] | None = None  # version of the weights on the rollout's devices
        self._wanted: tuple[Any, Group] | None = None
        self._offered: list[Any] = []
        self._max_waiting, self.launches = 0, 1
        self._order = threading.Lock()  # orders updates and offers of weights

    def update_actor(self, *args: object, **kwargs: object) -> Pending[Any]:
        with self._order:
            self._sent = None
            updated: Pending[Any] = self._actor.update_actor(*args, **kwargs)
            return updated

    def snapshot(self, *, waiting: int) -> "ActorSnapshot":
        """Return an actor that generates with the current weights, even if updates come before its generation.

        The weights are fetched at once, while the rollout group may still generate with earlier weights.

        Args:
          waiting: Maximum number of such actors that have not started to generate; each keeps a copy of the weights.
        """
        # Between two such actors the newest weights may be offered for an evaluation.
        self._max_waiting = 2 * waiting + 1
        if self._loaded is None:
            self._version()
        launches, known = self.launches, self._wanted
        if known is None:  # from the second time on the splits are known, so that no offer waits for generation
            group = self._fetch_group()
            self._wanted = known = self._rollout.wanted_weights().result(), group
        wanted, group = known
        fetched = group.fetch_weights(self._offer(wanted), number=next(self._fetches))
        return ActorSnapshot(self, self._rollout, fetched, launches)

    def _offer(self, wanted: Any) -> Pending[Any]:
        if wanted not in self._offered:
            self._offered.append(wanted)
        return self._actor.offer_weights(wanted, waiting=self._max_waiting)

    def send_again(self) -> None:
        """Send all of the newest weights to a rollout group that was relaunched, perhaps with fewer hosts."""
        self.launches += 1
        self._sent = self._loaded = self._wanted = None
        offered, self._offered = self._offered, []
        for wanted in offered:  # the processes that would fetch these offers are gone
            self._actor.withdraw_weights(wanted)
        self._version()

    def load(self, fetched: Pending[Any]) -> Pending[Any]:
        """Move fetched weights to the rollout's devices; return their version."""
        self._loaded = self._rollout.load_fetched(fetched)
        return self._loaded

    def _version(self) -> Pending[Any]:
        """Send the newest weights if the rollout's devices have others; return the version, as a future."""
        if self._sent is None or self._sent is not self._loaded:
            # Loaded into this process: a value on a host that dies would end the pool that reads the value.
            wanted = self._rollout.wanted_weights().result()
            with self._order:
                self._sent = self._loaded = sent = self._rollout.load_weights(self._offer(wanted))
            return sent
        return self._sent


class ActorSnapshot(DelegatesGeneration):
    """Actor that generates with the weights of the moment of the snapshot; other methods are the current actor's.

    No other caller may generate on the rollout's devices between this actor's first and last call.

    If the rollout group is relaunched before the first call, this actor generates with the newest weights.

    Args:
      fetched: Number of the fetched weights, as a future; the weights wait on the rollout's hosts for the first call.
      launches: Number of launches of the rollout group when the weights were fetched.
    """

    def __init__(self, actor: ActorWithRolloutPool, rollout: Group, fetched: Pending[Any], launches: int) -> None:
        self._actor, self._rollout = actor, rollout
        self._fetched, self._launches = fetched, launches
        self._loaded: Pending[Any] | None = None

    def _version(self) -> Pending[Any]:
        if self._loaded is None:
            relaunched = self._launches != self._actor.launches
            self._loaded = self._actor._version() if relaunched else self._actor.load(self._fetched)
        return self._loaded
