"""Service in front of inference servers: any thread submits requests, and each request resolves a future."""

import threading
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from time import monotonic

from jaxrlhf.config import Sampling
from jaxrlhf.engine.sequence import Completion, Request
from jaxrlhf.engine.servers.server_engine import ServerEngine


@dataclass(frozen=True)
class _Submitted:
    """Submitted request with its future."""

    request: Request
    sampling: Sampling
    seed: int
    future: Future[Completion] = field(default_factory=Future)


class ServerService:
    """Service of a `ServerEngine`, with the methods of `EngineService` that episodes call.

    Each request is one call of a server, in its own thread. Requests with the same `request_id`, as the turns of an
    episode, go to the same server, which may keep their common prefix.

    Attributes:
      held_s: Total seconds for which requests were held.
    """

    def __init__(self, engine: ServerEngine) -> None:
        self.engine, self.held_s = engine, 0.0
        self._threads = ThreadPoolExecutor(engine.server.concurrency, thread_name_prefix="server request")
        self._lock, self._holding, self._answered = threading.Lock(), False, False
        self._later: list[_Submitted] = []
        self._started: set[Future[None]] = set()
        self._since = monotonic()

    def submit(self, request: Request, sampling: Sampling, *, seed: int) -> Future[Completion]:
        """Submit a request and return the future of its completion; thread-safe."""
        submitted = _Submitted(request, sampling, seed)
        with self._lock:
            if self._holding:
                self._later.append(submitted)
            else:
                self._start(submitted)
        return submitted.future

    def release(self, request_id: int) -> None:
        """Do nothing: a server decides by itself what it keeps."""

    def hold(self) -> None:
        """Hold new requests from now on, and wait until the requests in progress are answered.

        Raises:
          EndpointError: A server has other weights than the run sent.
        """
        with self._lock:
            self._holding = True
            started = [*self._started]
        wait(started)
        self._since = monotonic()
        if self._answered:
            self._answered = False
            self.engine.check_weights()

    def resume(self) -> None:
        """Send the newest weights to the servers, then answer the held requests, and new ones.

        Raises:
          EndpointError: A server did not load the weights, or computes other log-probabilities.
        """
        self.engine.send_weights()
        with self._lock:
            self._holding = False
            self.held_s += monotonic() - self._since
            later, self._later = self._later, []
            for submitted in later:
                self._start(submitted)

    def close(self) -> None:
        """Cancel the requests that no server has got yet."""
        with self._lock:
            for submitted in self._later:
                submitted.future.cancel()
            self._later.clear()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _start(self, submitted: _Submitted) -> None:
        task = self._threads.submit(self._answer, submitted)
        self._started.add(task)
        task.add_done_callback(self._started.discard)

    def _answer(self, submitted: _Submitted) -> None:
        """Resolve the future of a request with a server's answer, or with the error of the call."""
        if not submitted.future.set_running_or_notify_cancel():
            return
        try:
            completion = self.engine.complete(submitted.request, submitted.sampling, seed=submitted.seed)
        except BaseException as error:
            submitted.future.set_exception(error)
        else:
            self._answered = True
            submitted.future.set_result(completion)
