"""Engine as a service: requests of any thread join between dispatches, and each has a future."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, SimpleQueue
from time import monotonic

from jaxrlhf.config import Sampling
from jaxrlhf.engine.engine import Engine
from jaxrlhf.engine.sequence import Completion, Request, SequenceState

OnTokens = Callable[[Sequence[int], Sequence[float]], None]
"""Listener to tokens and their log-probabilities, called in the engine's thread; it must not wait."""


@dataclass
class ServiceCounts:
    """Numbers that only grow, since the service began.

    Attributes:
      requests: Requests submitted, each of which is then one of `completed`, `cancelled` and `failed`.
      prompt_tokens: Tokens of prompts that were prefilled, once for all that wait together with one prompt.
      cached_tokens: Tokens of them that were in the cache.
      queue_s: Seconds between a request and its slot, of all requests together.
      busy_slots, slots: Slots in use, and slots there are, summed over dispatches.
    """

    requests: int = 0
    completed: int = 0
    cancelled: int = 0
    failed: int = 0
    drawn_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    queue_s: float = 0.0
    busy_slots: int = 0
    slots: int = 0


@dataclass(eq=False)
class _Asked:
    """A request on its way."""

    sequence: SequenceState
    on_tokens: OnTokens | None
    future: Future[Completion] = field(default_factory=Future)
    since: float = field(default_factory=monotonic)
    began: bool = False


class EngineService:
    """A thread that steps an engine as long as requests are under way.

    Several requests may have one seed and request_id, and are drawn alike if their prompts are. Nobody else may use
    the engine before `close`, but while it is held.

    Attributes:
      counts: What was done so far; written by the service's thread.
      held_s: Seconds for which requests were held.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine, self.counts, self.held_s = engine, ServiceCounts(), 0.0
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._asked: dict[Future[Completion], _Asked] = {}
        self._before = engine.prefill.prompt_tokens, engine.prefill.reused_tokens
        self._lock, self._closing = threading.Lock(), False
        self._holding, self._held, self._may_go_on = False, threading.Event(), threading.Event()
        self._later: list[_Asked] = []
        self._thread = threading.Thread(target=self._serve, name="engine", daemon=True)
        self._thread.start()

    def __enter__(self) -> "EngineService":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def waiting(self) -> int:
        """Requests that have no response yet."""
        return len(self._asked)

    def submit(
        self, request: Request, sampling: Sampling, *, seed: int, on_tokens: OnTokens | None = None
    ) -> Future[Completion]:
        """Ask for a response; thread-safe.

        `cancel` of the future drops the request and frees its slot.

        Args:
          seed: In [0, 2**32). With request_id and prompt it determines the response, whatever else is under way.

        Raises:
          Refusal: A request that the engine cannot answer.
          RuntimeError: The service is closed.
        """
        sequence = self.engine.begun(request, sampling, seed=seed)
        asked = _Asked(sequence, on_tokens)
        sequence.on_tokens = partial(self._drew, asked)
        sequence.on_completion = partial(self._end, asked)
        self._tell(lambda: self._start(asked))
        # After `_start` in the inbox, so that it is found there. A thread that is gone leaves it unread.
        asked.future.add_done_callback(
            lambda future: self._inbox.put(lambda: self._drop(asked)) if future.cancelled() else None
        )
        return asked.future

    def release(self, request_id: int) -> None:
        """Keep what was computed for a request with `keep` no longer. Thread-safe."""
        self._tell(lambda: self.engine.release(request_id))

    def hold(self) -> None:
        """Have requests wait from now on, and wait until those under way are answered.

        Until `go_on` the service leaves the engine alone: others may use it, and load other weights. One thread at a
        time may hold it.
        """

        def hold() -> None:
            self._holding = True

        self._held.clear()
        self._may_go_on.clear()
        self._tell(hold)
        self._held.wait()

    def go_on(self) -> None:
        """Answer the requests that were held, and those that come."""
        self._may_go_on.set()

    def close(self) -> None:
        """Cancel what is under way, and end the thread. What `keep` keeps stays in the engine."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
            self._inbox.put(lambda: None)
            self._may_go_on.set()
        self._thread.join()

    def _tell(self, command: Callable[[], None]) -> None:
        with self._lock:
            if self._closing:
                raise RuntimeError("the service is closed and takes no requests; make a new EngineService")
            self._inbox.put(command)

    def _serve(self) -> None:
        """Life of the thread: it waits for commands only where nothing is under way."""
        while not self._closing:
            try:
                self._obey(wait=not self.engine.unfinished and not self._holding)
                if self.engine.unfinished:
                    self._step()
                elif self._holding:
                    self._rest()
            except BaseException as error:  # whatever it is, those who wait are told, and others may ask again
                self.engine.free()
                self._later.clear()
                for asked in list(self._asked.values()):
                    self._end(asked, error)
        self._obey(wait=False)  # requests that came while others were held are among what is cancelled
        for asked in list(self._asked.values()):
            asked.future.cancel()
        self._obey(wait=False)
        self._held.set()  # nobody waits for a thread that is gone

    def _obey(self, *, wait: bool) -> None:
        """Do all that the inbox says; wait for a first command if there is none."""
        try:
            while True:
                self._inbox.get(block=wait)()
                wait = False
        except Empty:
            return

    def _rest(self) -> None:
        """Wait until requests are answered again. What comes meanwhile stays in the inbox."""
        since = monotonic()
        self._held.set()
        self._may_go_on.wait()
        self.held_s += monotonic() - since
        self._holding = False
        later, self._later = self._later, []
        for asked in later:
            self.engine.enqueue(asked.sequence)

    def _step(self) -> None:
        self.engine.step()
        counts, prefill, before = self.counts, self.engine.prefill, self._before
        counts.slots += self.engine.slots
        counts.prompt_tokens = prefill.prompt_tokens - before[0]
        counts.cached_tokens = prefill.reused_tokens - before[1]

    def _start(self, asked: _Asked) -> None:
        self.counts.requests += 1
        self._asked[asked.future] = asked
        if self._holding:
            self._later.append(asked)
        else:
            self.engine.enqueue(asked.sequence)

    def _drew(self, asked: _Asked, tokens: Sequence[int], logps: Sequence[float]) -> None:
        """Tokens of a response were read."""
        if not asked.began:
            asked.began = True
            self.counts.queue_s += asked.sequence.placed_at - asked.since
        self.counts.busy_slots += 1
        self.counts.drawn_tokens += len(tokens)
        if asked.on_tokens is not None and not asked.future.cancelled():
            try:
                asked.on_tokens(tokens, logps)
            except Exception as error:
                failure = error
                self._inbox.put(lambda: self._drop(asked, failure))  # not now: a step is under way

    def _drop(self, asked: _Asked, error: Exception | None = None) -> None:
        """Free the slot of a request that was cancelled, or whose listener failed."""
        if asked.future in self._asked:
            if asked in self._later:
                self._later.remove(asked)
            else:
                self.engine.cancel(asked.sequence)
            self._end(asked, error)

    def _end(self, asked: _Asked, outcome: Completion | BaseException | None) -> None:
        """Resolve the future of a request, unless it was cancelled."""
        if self._asked.pop(asked.future, None) is None:
            return
        if not asked.future.set_running_or_notify_cancel():
            self.counts.cancelled += 1
        elif isinstance(outcome, Completion):
            self.counts.completed += 1
            asked.future.set_result(outcome)
        else:
            self.counts.failed += 1
            asked.future.set_exception(outcome)
