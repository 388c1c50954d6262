"""Engine service: any thread submits requests, which join between dispatches and resolve a future each."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, SimpleQueue
from time import monotonic

from jaxrlhf.config import Sampling
from jaxrlhf.engine.engine import Engine
from jaxrlhf.engine.scoring import TokenScores
from jaxrlhf.engine.sequence import Completion, Request, SequenceState

OnTokens = Callable[[Sequence[int], Sequence[float]], None]
"""Listener for tokens and their log-probabilities, called in the engine's thread; it must not block."""


@dataclass
class ServiceCounts:
    """Counters of a service since its start; they only grow.

    Attributes:
      requests: Number of submitted requests; each is later counted in `completed`, `cancelled` or `failed`.
      prompt_tokens: Number of prefilled prompt tokens; a prompt shared by waiting requests counts once.
      cached_tokens: Number of these tokens that were in the cache.
      queue_s: Seconds between submission and slot, summed over requests.
      busy_slots, slots: Slots in use, and all slots, summed over dispatches.
      drafted_tokens, accepted_tokens: Number of verified drafted tokens, and number of them that were sampled.
    """

    requests: int = 0
    completed: int = 0
    cancelled: int = 0
    failed: int = 0
    sampled_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    queue_s: float = 0.0
    busy_slots: int = 0
    slots: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0


@dataclass(eq=False)
class _PendingRequest:
    """Request in progress, with its future and listener."""

    sequence: SequenceState
    on_tokens: OnTokens | None
    future: Future[Completion] = field(default_factory=Future)
    since: float = field(default_factory=monotonic)
    began: bool = False


@dataclass(eq=False)
class _PendingScore:
    """Sequence to score, with its future."""

    tokens: Sequence[int]
    temperature: float
    future: Future[TokenScores] = field(default_factory=Future)


class EngineService:
    """Service thread that steps an engine while requests are in progress.

    Several requests may have the same seed and request_id; if their prompts are equal too, so are their responses. No
    other code may use the engine before `close`, except between `hold` and `resume`.

    Attributes:
      counts: Counters so far; written by the service's thread.
      held_s: Total seconds for which requests were held.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine, self.counts, self.held_s = engine, ServiceCounts(), 0.0
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._asked: dict[Future[Completion], _PendingRequest] = {}
        self._before = engine.prefill.prompt_tokens, engine.prefill.reused_tokens
        self._lock, self._closing = threading.Lock(), False
        self._holding, self._held, self._may_resume = False, threading.Event(), threading.Event()
        self._later: list[_PendingRequest] = []
        self._unscored: list[_PendingScore] = []
        self._thread = threading.Thread(target=self._serve, name="engine", daemon=True)
        self._thread.start()

    def __enter__(self) -> "EngineService":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def waiting(self) -> int:
        """Number of requests without a response."""
        return len(self._asked)

    def submit(
        self, request: Request, sampling: Sampling, *, seed: int, on_tokens: OnTokens | None = None
    ) -> Future[Completion]:
        """Submit a request and return the future of its completion; thread-safe.

        `cancel` of the future drops the request and frees its slot.

        Args:
          seed: Integer in [0, 2**32). Seed, request_id and prompt determine the response; other requests do not matter.

        Raises:
          Refusal: The engine cannot answer the request.
          RuntimeError: The service is closed.
        """
        sequence = self.engine.new_sequence(request, sampling, seed=seed)
        asked = _PendingRequest(sequence, on_tokens)
        sequence.on_tokens = partial(self._on_tokens, asked)
        sequence.on_completion = partial(self._end, asked)
        self._enqueue(lambda: self._start(asked))
        # Queued after `_start`, so that `_drop` finds the request. A thread that has ended leaves the command unread.
        asked.future.add_done_callback(
            lambda future: self._inbox.put(lambda: self._drop(asked)) if future.cancelled() else None
        )
        return asked.future

    def score(self, tokens: Sequence[int], *, temperature: float = 1.0) -> Future[TokenScores]:
        """Submit a sequence to score and return the future of its scores; thread-safe.

        Raises:
          Refusal: The engine cannot score the sequence.
          RuntimeError: The service is closed.
        """
        self.engine.limits.check_scored(tokens)
        pending = _PendingScore(tokens, temperature)
        self._enqueue(lambda: self._unscored.append(pending))
        return pending.future

    def release(self, request_id: int) -> None:
        """Release the cache that `keep` holds for a request; thread-safe."""
        self._enqueue(lambda: self.engine.release(request_id))

    def hold(self) -> None:
        """Hold new requests from now on, and wait until the requests in progress are answered.

        Until `resume` the service does not use the engine: other code may use it, for example to load other weights.
        Only one thread at a time may hold the service.
        """

        def hold() -> None:
            self._holding = True

        self._held.clear()
        self._may_resume.clear()
        self._enqueue(hold)
        self._held.wait()

    def resume(self) -> None:
        """Resume the service: answer the held requests, and new ones."""
        self._may_resume.set()

    def close(self) -> None:
        """Cancel the requests in progress and end the thread; caches held by `keep` stay in the engine."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
            self._inbox.put(lambda: None)
            self._may_resume.set()
        self._thread.join()

    def _enqueue(self, command: Callable[[], None]) -> None:
        with self._lock:
            if self._closing:
                raise RuntimeError("the service is closed and takes no requests; make a new EngineService")
            self._inbox.put(command)

    def _serve(self) -> None:
        """Run the thread's loop; block for commands only if no request is in progress."""
        while not self._closing:
            try:
                self._run_commands(wait=not (self.engine.unfinished or self._holding or self._unscored))
                if self._unscored and not self._holding:
                    self._score()
                if self.engine.unfinished:
                    self._step()
                elif self._holding:
                    self._wait_for_resume()
            except BaseException as error:  # any error fails all open requests; later requests are served again
                self.engine.free()
                self._later.clear()
                for asked in list(self._asked.values()):
                    self._end(asked, error)
        self._run_commands(wait=False)  # so that requests that arrived during a hold are cancelled too
        for asked in list(self._asked.values()):
            asked.future.cancel()
        for pending in self._unscored:
            pending.future.cancel()
        self._run_commands(wait=False)
        self._held.set()  # so that no caller of `hold` waits for a thread that has ended

    def _run_commands(self, *, wait: bool) -> None:
        """Run all commands in the inbox; with `wait`, block until there is a first command."""
        try:
            while True:
                self._inbox.get(block=wait)()
                wait = False
        except Empty:
            return

    def _wait_for_resume(self) -> None:
        """Wait for `resume`; commands that arrive meanwhile stay in the inbox."""
        since = monotonic()
        self._held.set()
        self._may_resume.wait()
        self.held_s += monotonic() - since
        self._holding = False
        later, self._later = self._later, []
        for asked in later:
            self.engine.enqueue(asked.sequence)

    def _score(self) -> None:
        """Score the sequences that run together with the one that waits for longest."""
        first = self._unscored[0]
        alike = [pending for pending in self._unscored if pending.temperature == first.temperature]
        batches = self.engine.scoring.batches([pending.tokens for pending in alike])
        batch = next(batch for batch in map(set, batches) if 0 in batch)
        taken = [pending for index, pending in enumerate(alike) if index in batch]
        self._unscored = [pending for pending in self._unscored if pending not in taken]
        taken = [pending for pending in taken if pending.future.set_running_or_notify_cancel()]
        try:
            scores = self.engine.score([pending.tokens for pending in taken], temperature=first.temperature)
        except BaseException as error:
            for pending in taken:
                pending.future.set_exception(error)
            return
        for pending, each in zip(taken, scores, strict=True):
            pending.future.set_result(each)

    def _step(self) -> None:
        self.engine.step()
        counts, prefill, before = self.counts, self.engine.prefill, self._before
        counts.slots += self.engine.slots
        counts.prompt_tokens = prefill.prompt_tokens - before[0]
        counts.cached_tokens = prefill.reused_tokens - before[1]
        speculated = self.engine.speculation.counts
        counts.drafted_tokens, counts.accepted_tokens = speculated.drafted, speculated.accepted

    def _start(self, asked: _PendingRequest) -> None:
        self.counts.requests += 1
        self._asked[asked.future] = asked
        if self._holding:
            self._later.append(asked)
        else:
            self.engine.enqueue(asked.sequence)

    def _on_tokens(self, asked: _PendingRequest, tokens: Sequence[int], logps: Sequence[float]) -> None:
        """Count the tokens that were read of a response, and pass them to its listener."""
        if not asked.began:
            asked.began = True
            self.counts.queue_s += asked.sequence.placed_at - asked.since
        self.counts.busy_slots += 1
        self.counts.sampled_tokens += len(tokens)
        if asked.on_tokens is not None and not asked.future.cancelled():
            try:
                asked.on_tokens(tokens, logps)
            except Exception as error:
                failure = error
                self._inbox.put(lambda: self._drop(asked, failure))  # not now: a step is in progress

    def _drop(self, asked: _PendingRequest, error: Exception | None = None) -> None:
        """Drop a request that was cancelled or whose listener failed, and free its slot."""
        if asked.future in self._asked:
            if asked in self._later:
                self._later.remove(asked)
            else:
                self.engine.cancel(asked.sequence)
            self._end(asked, error)

    def _end(self, asked: _PendingRequest, outcome: Completion | BaseException | None) -> None:
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
