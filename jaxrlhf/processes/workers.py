"""Worker processes of one piece of user code, forked from a process that has loaded the code, and their jobs.

A process works at one job at a time. A process that dies, hangs or sends an invalid answer is replaced, and its job
fails.
"""

import math
import selectors
import time
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import Any

from jaxrlhf.config import Refusal
from jaxrlhf.processes.channel import Garbled
from jaxrlhf.processes.forking import END, SHOW, CodeLoaded, CodeRefused, ProcessEnded, ProcessForked
from jaxrlhf.processes.forkserver import GRACE_S, MOST_FORKS, ForkServer, how_it_ended
from jaxrlhf.processes.jobs import NUMBER, Answer, Code, CodeFailure, Idle, Job, Process, Split
from jaxrlhf.processes.output import ProcessOutput
from jaxrlhf.processes.plain import loads

SLACK_S = 0.5  # after the limit, for async calls to be cancelled
SHOW_S = 0.1  # for a process to print its stack before it is killed
START_ATTEMPTS = 3  # consecutive starts of a fork server
SERVER_S = 60.0  # for the fork server to start or end a process; code may stop it by a signal


class WorkerGroup:
    """Worker processes of one piece of user code. All methods run on the selector's thread.

    Args:
      selector: Selector; its owner calls `ready` of the group that is the first item of a key's data.

    Attributes:
      about: Description of the code; None until the code is loaded.
    """

    def __init__(self, code: Code, selector: selectors.BaseSelector, output: Path | None) -> None:
        self.code, self._selector, self._output = code, selector, output
        self.about: Any = None
        self.processes: dict[int, Process] = {}
        self._waiting: deque[Job] = deque()
        self._due: deque[Process] = deque()
        self._free: dict[int, Process] = {}
        self._busy: set[Process] = set()
        self._starts, self._server_due_s = 0, math.inf
        self._start_server()

    def submit(self, job: Job) -> None:
        if job.process is None:
            self._waiting.append(job)
        elif job.process.ending:
            job.lose(_ENDED)
        else:
            job.process.queue.append(job)
            if job.process.job is None and len(job.process.queue) == 1:
                self._due.append(job.process)

    def forget(self, job: Job) -> None:
        """Withdraw a job; kill the process that works at it, unless the process has other instances too."""
        job.done = True
        if job in self._waiting:
            self._waiting.remove(job)
        elif job.process is not None and job in job.process.queue:
            job.process.queue.remove(job)
        for process in [one for one in self._busy if one.job is job]:
            if len(process.instances) <= 1:
                self.kill(process)

    def feed(self) -> None:
        """Send queued jobs to idle processes: jobs of instances first, then new jobs; fork missing processes."""
        while self._due and len(self._busy) < self.code.workers:
            process = self._due.popleft()
            if not process.ending and process.job is None and process.queue:
                self._start_job(process, process.queue.popleft())
        while self._waiting and len(self._busy) < self.code.workers and self._free:
            process = self._free.pop(next(iter(self._free)))
            if not process.ending and process.job is None and not process.queue:
                self._start_job(process, self._waiting.popleft())
        self._fork()

    def _fork(self) -> None:
        """Request processes for waiting jobs."""
        most = self.code.instances
        room = sum(
            most - len(process.instances)
            for process in (self.processes.values() if most > 1 and self._waiting else ())
            if process.instances and not process.spoilt and not process.ending
        )
        wanted = min(math.ceil((len(self._waiting) - room) / most), self.code.workers - len(self._busy), MOST_FORKS)
        for _ in range(int(wanted) - self._server.asked if self.about is not None and not self._free else 0):
            try:
                self._server.fork()
            except BlockingIOError:
                return
            except OSError as error:
                self._fork_failed(str(error))
                return
            self._expect_server()

    def _fork_failed(self, why: str) -> None:
        """Fail the oldest waiting job, unless a busy process will take it later."""
        if self._waiting and not (self._busy and self.code.life > 1 and self._waiting[0].opens is None):
            self._waiting.popleft().lose(CodeFailure("crash", f"no process could be started for it: {why}"))

    def _start_job(self, process: Process, job: Job) -> None:
        self._free.pop(process.pid, None)
        try:
            process.channel.send(NUMBER.pack(process.served) + job.request)
            self._watch(process)
        except OSError:  # the process died while it was idle
            self.kill(process)
            self._waiting.appendleft(job) if job.process is None else job.lose(_ENDED)
            return
        process.job = job
        self._set_deadline(process, calls=job.steps)
        self._busy.add(process)
        if job.opens is not None:
            process.instances.add(job.opens)
            job.process = process

    def _set_deadline(self, process: Process, *, calls: int = 1) -> None:
        """Set the deadline of a process's next answer, with time for `calls` calls."""
        process.began_s = time.monotonic()
        process.end_s, process.late = process.began_s + calls * self.code.limit_s + SLACK_S, False

    def _watch(self, process: Process) -> None:
        unsent = not process.channel.flush()
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if unsent else 0)
        key = self._selector.get_key(process.channel)
        if key.events != events:
            self._selector.modify(process.channel, events, key.data)

    def deadline_s(self) -> float:
        """Return the earliest deadline of all busy processes and of the fork server."""
        busy_s = min((process.end_s for process in self._busy if not process.ending), default=math.inf)
        return min(busy_s, self._server_due_s)

    def kill_late(self, now: float) -> None:
        """Let processes that are past their deadlines print their stacks, and kill them a little later.

        A fork server past its deadline is replaced, with all its processes.
        """
        if self._server_due_s <= now:
            self._restart_server()
        for process in [one for one in self._busy if one.end_s <= now and not one.ending]:
            if process.late:
                self.kill(process)
                continue
            process.late, process.end_s = True, now + SHOW_S
            with suppress(OSError):  # the server is gone
                self._server.command(SHOW, process.pid)

    def kill(self, process: Process) -> None:
        """Request that a process is killed; `ProcessEnded` will report its end."""
        self._release(process)
        try:
            self._server.command(END, process.pid)
            self._expect_server()
        except OSError:
            self._restart_server()

    def _expect_server(self) -> None:
        """Set the deadline of the fork server's next message; a server that still loads the code has none."""
        if not self._loaded:
            return
        self._server_due_s = min(self._server_due_s, time.monotonic() + SERVER_S)

    def _release(self, process: Process) -> None:
        """Close the channel of a process; the process then ends itself."""
        self._free.pop(process.pid, None)
        if not process.ending:
            process.ending = True
            self._selector.unregister(process.channel)
            process.channel.close()

    def ready(self, source: Process | ForkServer | ProcessOutput, events: int) -> None:
        """Handle what has arrived from a process or the fork server, or the output of the fork server."""
        if isinstance(source, ForkServer):
            self._receive_from_server()
        elif isinstance(source, ProcessOutput):
            # The output of an earlier server is closed.
            if source is self._server.output and not source.forward():  # nothing has the pipe open any more
                self._selector.unregister(source)
        elif not source.ending:
            self._serve(source, events)

    def _serve(self, process: Process, events: int) -> None:
        try:
            if events & selectors.EVENT_WRITE:
                self._watch(process)
            if events & selectors.EVENT_READ:
                self._receive(process)
        except (EOFError, OSError, Garbled):
            self.kill(process)

    def _receive(self, process: Process) -> bool:
        """Handle the answers that have arrived, and return whether there were any."""
        try:
            messages = process.channel.receive()
            for message in messages:
                self._handle_message(process, message)
        except Garbled as error:  # user code wrote into the channel: further bytes cannot be decoded
            process.garbled = str(error)
            raise
        return bool(messages)

    def _handle_message(self, process: Process, message: bytes) -> None:
        job = process.job
        if job is None or message[: NUMBER.size] != NUMBER.pack(process.served):
            raise Garbled("an answer to no request")
        match loads(message[NUMBER.size :], (Answer, Split, Idle)):
            case Answer() as answer:
                job.answer(answer)
            case Split():
                job.split()
            case Idle(spoilt):
                job.end(spoilt=bool(spoilt))
                self._reassign(process, spoilt=bool(spoilt))
                return
        self._set_deadline(process)

    def _reassign(self, process: Process, *, spoilt: bool) -> None:
        """Assign a process that has ended its job: to its queued jobs, to new jobs, or let it end."""
        process.job = None
        self._busy.discard(process)
        process.served += 1
        process.spoilt = process.spoilt or spoilt or process.served >= self.code.life
        if process.queue:
            self._due.append(process)
        elif process.spoilt and not process.instances:
            self._release(process)
        elif not process.spoilt and len(process.instances) < self.code.instances:
            self._free[process.pid] = process

    def _receive_from_server(self) -> None:
        try:
            for message in self._server.receive():
                match message:
                    case CodeLoaded(about):
                        self.about, self._starts = loads(about.encode(), [self.code.about]), 0
                        self._loaded = True
                    case CodeRefused(reason):
                        raise Refusal(reason)
                    case ProcessForked(pid, detail):
                        self._forked(pid, detail)
                    case ProcessEnded(pid, status):
                        if (process := self.processes.pop(pid, None)) is not None:
                            self._handle_exit(process, how_it_ended(status))
                self._server_due_s = math.inf
                if self._server.asked or any(process.ending for process in self._busy):
                    self._expect_server()
        except (EOFError, OSError, Garbled):
            self._restart_server()

    def _forked(self, pid: int, detail: str) -> None:
        channel = self._server.take()
        if pid < 0:
            channel.close()
            self._fork_failed(detail)
            return
        process = self.processes[pid] = self._free[pid] = Process(pid, channel)
        self._selector.register(channel, selectors.EVENT_READ, (self, process))

    def _handle_exit(self, process: Process, ended: str) -> None:
        """Fail the jobs of a process that is gone; the current job gets the cause."""
        with suppress(EOFError, OSError, Garbled):  # answers that the process sent before its end
            while not process.ending and self._receive(process):
                pass
        self._release(process)
        self._busy.discard(process)
        job, process.job = process.job, None
        if job is not None:
            job.lose(self._cause(process, ended), time.monotonic() - process.began_s)
        while process.queue:
            process.queue.popleft().lose(_ENDED)

    def _cause(self, process: Process, ended: str) -> CodeFailure:
        if process.garbled:
            detail = f"code wrote into the connection of its process ({process.garbled}); the process was ended"
            return CodeFailure("crash", detail)
        if process.late:
            return CodeFailure("timeout", f"no answer within {self.code.limit_s:g} s; its process was ended")
        return CodeFailure("crash", f"its process {ended}")

    def _start_server(self) -> None:
        self._server, self._loaded = ForkServer(self.code, self._output), False
        for source in (self._server, self._server.output):
            self._selector.register(source, selectors.EVENT_READ, (self, source))

    def _restart_server(self) -> None:
        """Start another fork server after the last one died; its worker processes are gone with it."""
        for source in (self._server, self._server.output):
            with suppress(KeyError):  # nothing prints any more
                self._selector.unregister(source)
        ended = self._server.end(patience_s=0.0)
        self._starts += 1
        if self.about is None or self._starts >= START_ATTEMPTS:
            raise Refusal(f"{self.code.name}: the process that loads it {ended}; its output says why")
        self._server_due_s = math.inf
        gone, self.processes = self.processes, {}
        self._start_server()
        for process in gone.values():
            self._handle_exit(process, ended)

    def jobs(self) -> list[Job]:
        """Return the unfinished jobs."""
        in_progress = [process.job for process in self._busy if process.job is not None]
        return [*self._waiting, *in_progress, *(job for process in self.processes.values() for job in process.queue)]

    def close(self) -> None:
        """Tell all processes to close their instances and end."""
        for process in self.processes.values():
            self._release(process)
        self._server.close()

    def end(self) -> None:
        """End all processes; kill the processes that do not end by themselves."""
        self._server.end(patience_s=GRACE_S if self.about is not None else 0.0)


_ENDED = CodeFailure("crash", "its process ended in a call of another episode")
