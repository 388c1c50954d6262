"""Worker processes of one environment setting, forked from a process that has loaded the code, and their requests."""

import math
import pickle
import selectors
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from jaxrlhf.config import Refusal
from jaxrlhf.config.environments import Agent, Environment, Tools
from jaxrlhf.environments.protocol import About, Answer, Choice, CodeFailure, Idle, OpenRequest, Request
from jaxrlhf.processes.channel import Channel, Garbled
from jaxrlhf.processes.forking import CodeLoaded, CodeRefused, ProcessEnded, ProcessForked
from jaxrlhf.processes.forkserver import LARGEST_ANSWER, MOST_FORKS, ForkServer
from jaxrlhf.processes.guards import SLACK_S
from jaxrlhf.processes.interpreter import how_it_ended
from jaxrlhf.processes.plain import loads

GRACE_S = 1.0  # after the limit and the slack; a process normally ends itself earlier
LIFE = 1000  # requests per process; then a new process replaces it, which frees leaked resources
START_ATTEMPTS = 3  # consecutive starts of a fork server


@dataclass(eq=False)
class Job:
    """Request and the callbacks for its answers.

    Attributes:
      answered: Callback for each answer; `Idle` is the last answer.
      lost: Callback if the process died or could not be started, with the seconds since the request or last answer.
      over: Callback when the pool ends.
      process: Process that has the request's instance; None if any process may take the request.
    """

    request: Request
    pickled: bytes
    answered: Callable[[Answer], None]
    lost: Callable[[CodeFailure, float], None]
    over: Callable[[BaseException], None]
    process: "Process | None" = None


@dataclass(eq=False)
class Process:
    """Worker process, its requests, and the episodes whose instances it has.

    Attributes:
      job: Request that the process works at; None if it is idle.
      queue: Further requests for its instances.
      began_s, end_s: Time of the last answer or of the request, and deadline of the next answer.
      served: Number of finished requests.
      spoilt: The process must not run further episodes.
      ending: The process has been told to end.
      late: The process was told to end because it exceeded the deadline.
    """

    pid: int
    channel: Channel
    episodes: set[int] = field(default_factory=set)
    job: Job | None = None
    queue: deque[Job] = field(default_factory=deque)
    began_s: float = 0.0
    end_s: float = float("inf")
    served: int = 0
    spoilt: bool = False
    ending: bool = False
    late: bool = False


class WorkerGroup:
    """Worker processes of one environment setting. All methods run on the selector's thread.

    Args:
      selector: Selector; its owner calls `ready` of the family that is the first item of a key's data.
    """

    def __init__(self, choice: Choice, selector: selectors.BaseSelector, output: Path | None) -> None:
        self.choice, self._selector, self._output = choice, selector, output
        self.about, self.loaded = About(), False
        self._limit_s = float("inf") if isinstance(choice, Agent) else choice.call_s
        self._most_running = float("inf") if isinstance(choice, Agent) else choice.workers
        self._most_episodes = choice.episodes_per_process if isinstance(choice, Environment) else 1
        self._waiting: deque[Job] = deque()
        self._due: deque[Process] = deque()
        self._free: dict[int, Process] = {}
        self.processes: dict[int, Process] = {}
        self._busy: set[Process] = set()
        self._starts = 0
        self._start()

    @property
    def name(self) -> str:
        match self.choice:
            case Tools():
                return ", ".join(self.choice.functions)
            case Environment():
                return self.choice.factory
            case _:
                return self.choice.program

    def submit(self, job: Job) -> None:
        if job.process is None:
            self._waiting.append(job)
        elif job.process.ending:
            job.lost(_GONE, 0.0)
        else:
            job.process.queue.append(job)
            if job.process.job is None and len(job.process.queue) == 1:
                self._due.append(job.process)

    def forget(self, job: Job) -> None:
        """Withdraw a request; kill the process that works at it, unless the process has other episodes too."""
        if job in self._waiting:
            self._waiting.remove(job)
        elif job.process is not None and job in job.process.queue:
            job.process.queue.remove(job)
        for process in [one for one in self._busy if one.job is job]:
            if len(process.episodes) <= 1:
                self.kill(process)

    def feed(self) -> None:
        """Send queued requests to idle processes: open episodes first, then new requests; fork missing processes."""
        while self._due and len(self._busy) < self._most_running:
            process = self._due.popleft()
            if not process.ending and process.job is None and process.queue:
                self._begin(process, process.queue.popleft())
        while self._waiting and len(self._busy) < self._most_running and self._free:
            process = self._free.pop(next(iter(self._free)))
            if not process.ending and process.job is None and not process.queue:
                self._begin(process, self._waiting.popleft())
        self._fork()

    def _fork(self) -> None:
        """Request processes for waiting requests."""
        room = sum(
            self._most_episodes - len(process.episodes)
            for process in (self.processes.values() if self._most_episodes > 1 and self._waiting else ())
            if process.episodes and not process.spoilt and not process.ending
        )
        wanted = min(
            float(math.ceil((len(self._waiting) - room) / self._most_episodes) - self._server.asked),
            self._most_running - len(self._busy),
            MOST_FORKS - self._server.asked,
        )
        for _ in range(int(wanted) if self.loaded and not self._free else 0):
            try:
                self._server.fork()
            except BlockingIOError:
                return
            except OSError as error:
                self._no_process(str(error))
                return

    def _no_process(self, why: str) -> None:
        """Fail the oldest waiting request, unless a busy process of the same tools will take it later."""
        if self._waiting and not (self._busy and isinstance(self.choice, Tools)):
            self._waiting.popleft().lost(CodeFailure("crash", f"no process could be started for it: {why}"), 0.0)

    def _begin(self, process: Process, job: Job) -> None:
        self._free.pop(process.pid, None)
        try:
            process.channel.send(job.pickled)
            self._watch(process)
        except OSError:  # the process died while it was idle
            self.kill(process)
            self._waiting.appendleft(job) if job.process is None else job.lost(_GONE, 0.0)
            return
        process.job = job
        self._count_from_now(process, calls=2 if isinstance(job.request, OpenRequest) else 1)  # 2: factory and reset
        self._busy.add(process)
        if isinstance(job.request, OpenRequest):
            process.episodes.add(job.request.episode)
            job.process = process

    def _count_from_now(self, process: Process, *, calls: int = 1) -> None:
        """Set the deadline of a process's next answer, with time for `calls` calls."""
        process.began_s = time.monotonic()
        process.end_s = process.began_s + calls * self._limit_s + SLACK_S + GRACE_S

    def _watch(self, process: Process) -> None:
        unsent = not process.channel.flush()
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if unsent else 0)
        key = self._selector.get_key(process.channel)
        if key.events != events:
            self._selector.modify(process.channel, events, key.data)

    def deadline_s(self) -> float:
        """Return the earliest deadline of all busy processes."""
        return min((process.end_s for process in self._busy if not process.ending), default=float("inf"))

    def kill_late(self, now: float) -> None:
        for process in [one for one in self._busy if one.end_s <= now and not one.ending]:
            process.late = True
            self.kill(process)

    def kill(self, process: Process) -> None:
        """Request that a process is killed; `ProcessEnded` will report its end."""
        self._let_go(process)
        try:
            self._server.end_process(process.pid)
        except OSError:
            self._server_is_gone()

    def _let_go(self, process: Process) -> None:
        """Close the channel of a process; the process then ends itself."""
        self._free.pop(process.pid, None)
        if not process.ending:
            process.ending = True
            self._selector.unregister(process.channel)
            process.channel.close()

    def ready(self, process: Process | None, events: int) -> None:
        """Handle messages of a process or, if `process` is None, of the fork server."""
        if process is None:
            self._hear_server()
        if process is None or process.ending:
            return
        try:
            if events & selectors.EVENT_WRITE:
                self._watch(process)
            if events & selectors.EVENT_READ:
                for message in process.channel.receive():
                    self._hear(process, loads(message))
        except Exception:  # closed, or user code wrote into the channel: further bytes cannot be decoded
            self.kill(process)

    def _hear(self, process: Process, answer: Answer) -> None:
        if process.job is None or not isinstance(answer, Answer):
            raise Garbled("nothing was asked")
        process.job.answered(answer)
        if not isinstance(answer, Idle):
            self._count_from_now(process)
            return
        process.job = None
        self._busy.discard(process)
        process.served += 1
        process.spoilt = process.spoilt or bool(answer.spoilt) or process.served >= LIFE
        self.rest(process)

    def rest(self, process: Process) -> None:
        """Assign an idle process: to its queued requests, to new episodes, or let it end."""
        if process.ending or process.job is not None:
            return
        if process.queue:
            self._due.append(process)
        elif process.spoilt and not process.episodes:
            self._let_go(process)
        elif not process.spoilt and len(process.episodes) < self._most_episodes:
            self._free[process.pid] = process

    def _hear_server(self) -> None:
        try:
            for message in self._server.receive():
                match message:
                    case CodeLoaded(about):
                        self.about, self.loaded, self._starts = about, True, 0
                    case CodeRefused(reason):
                        raise Refusal(reason)
                    case ProcessForked(pid, detail):
                        self._forked(pid, detail)
                    case ProcessEnded(pid, status):
                        if (process := self.processes.pop(pid, None)) is not None:
                            self._handle_exit(process, how_it_ended(status))
        except (EOFError, OSError, Garbled, pickle.UnpicklingError):
            self._server_is_gone()

    def _forked(self, pid: int, detail: str) -> None:
        channel = self._server.take()
        if pid < 0:
            channel.close()
            self._no_process(detail)
            return
        process = self.processes[pid] = self._free[pid] = Process(pid, channel)
        self._selector.register(channel, selectors.EVENT_READ, (self, process))

    def _handle_exit(self, process: Process, ended: str) -> None:
        """Fail the requests of a process that is gone; the current request gets the blame."""
        if not process.ending:
            with suppress(Exception):  # answers that the process sent before its end
                while messages := process.channel.receive():
                    for message in messages:
                        self._hear(process, loads(message))
        self._let_go(process)
        self._busy.discard(process)
        job, process.job = process.job, None
        if job is not None:
            seconds = time.monotonic() - process.began_s
            late = process.late or seconds >= 0.95 * self._limit_s
            lost = f"no answer within {self._limit_s:g} s; its process was ended" if late else f"its process {ended}"
            job.lost(CodeFailure("timeout" if late else "crash", lost), seconds)
        for other in process.queue:
            other.lost(_GONE, 0.0)
        process.queue.clear()

    def _start(self) -> None:
        largest = LARGEST_ANSWER + 2 * self.choice.output_bytes  # bound on the text and the message around it
        loader = "jaxrlhf.environments.forms:load_choice"
        self._server = ForkServer(loader, self.choice, self._output, largest=largest)
        self._selector.register(self._server.control, selectors.EVENT_READ, (self, None))

    def _server_is_gone(self) -> None:
        """Start another fork server after the last one died; its worker processes are gone with it."""
        self._selector.unregister(self._server.control)
        ended = self._server.end(patience_s=0.0)
        self._starts += 1
        if not self.loaded or self._starts >= START_ATTEMPTS:
            raise Refusal(f"{self.name}: the process that loads it {ended}; what it printed says why")
        gone, self.processes = self.processes, {}
        self._start()
        for process in gone.values():
            self._handle_exit(process, ended)

    def jobs(self) -> list[Job]:
        """Return the unfinished requests."""
        under_way = [process.job for process in self._busy if process.job is not None]
        return [*self._waiting, *under_way, *(job for process in self.processes.values() for job in process.queue)]

    def close(self) -> None:
        """Tell all processes to close their instances and end."""
        for process in self.processes.values():
            self._let_go(process)
        self._server.close()

    def end(self) -> None:
        """End all processes; kill the processes that do not end by themselves."""
        self._server.end()


_GONE = CodeFailure("crash", "its process went down in a call of another episode")
