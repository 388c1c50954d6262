"""Fork server: the process that imports user code once and forks a worker process for each request.

A fork takes milliseconds and about 3 MB; a new interpreter that imports the code takes a second and about 100 MB.
Forking therefore lets every episode have its own process. The fork server imports the user code and runs no other part
of it. The server is the ancestor of all processes that the user code starts. On Linux, processes that outlive their
worker become children of the server, and the server kills them. When the run is gone, the server ends and all
processes end with it.

Code that starts threads at import cannot be forked; its workers are new interpreters instead. Messages to the run are
plain data (`plain.py`), because user code can write into the connections.
"""

import faulthandler
import gc
import importlib
import os
import pickle
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, Protocol

from jaxrlhf.config import Refusal
from jaxrlhf.processes.channel import Channel
from jaxrlhf.processes.descendants import adopt_orphans, children, descendants, end_with_parent, kill
from jaxrlhf.processes.folders import remove
from jaxrlhf.processes.guards import SHOW_SIGNAL, settle, show_stack_on_signal
from jaxrlhf.processes.output import STDERR, STDOUT, Log, ProcessOutput
from jaxrlhf.processes.plain import dumps

COMMAND = struct.Struct("!cq")  # FORK, sent along with a socket, or SHOW or END and a process id
FORK, SHOW, END = b"F", b"S", b"E"
LARGEST_REQUEST = 1 << 30
SETUP = "setup"
ORPHAN_CHECK_S = 5.0
GRACE_S = 1.0  # for the next process to end by itself once the run is gone
MOST_ROUNDS = 100  # rounds of killing processes that keep forking


class Served(Protocol):
    """Loaded user code that serves requests.

    Attributes:
      about: Dataclass of plain values, description of the code that is sent to the run.
      forkable: False if worker processes must be new interpreters, such as for code that has started native threads.
    """

    @property
    def about(self) -> Any: ...
    @property
    def forkable(self) -> bool: ...

    def serve(self, channel: Channel) -> None:
        """Answer requests until the channel closes; runs in a worker process."""


@dataclass(frozen=True)
class CodeLoaded:
    """Message: the user code is loaded; `about` is its description, encoded by `plain.dumps`."""

    about: str


@dataclass(frozen=True)
class CodeRefused:
    """Message: the user code could not be loaded."""

    reason: str


@dataclass(frozen=True)
class ProcessForked:
    """Message: result of the oldest open fork request.

    Attributes:
      pid: Id of the new process; below 0 if the fork failed.
      detail: Reason of the failure.
    """

    pid: int
    detail: str = ""


@dataclass(frozen=True)
class ProcessEnded:
    """Message: a process and all its descendants are gone; `status` is the value of `os.waitstatus_to_exitcode`."""

    pid: int
    status: int


def main(fd: int, log: int, parent: int, loader: str, folder: str) -> None:
    """Serve the socket at `fd` until it closes or the process `parent` is gone.

    Args:
      log: Descriptor of the log of the run. The standard streams of this process are a pipe to the run, which bounds
        what the user code prints while it is imported.
      loader: `module:function`; the function receives the setup and returns a `Served`.
      folder: Folder for the temporary files of the processes, with the pickled setup in the file `SETUP`.
    """
    settle()
    adopt_orphans()
    faulthandler.enable()
    control = Channel(socket.socket(fileno=fd), largest=LARGEST_REQUEST, blocking=True)
    with suppress(ConnectionError):  # the run is gone
        try:
            served = _load(loader, Path(folder))
        except Refusal as error:
            control.send(dumps(CodeRefused(str(error))))
            return
        gc.collect()
        gc.freeze()  # garbage collection in a fork would write to, and so copy, the pages shared with this process
        control.send(dumps(CodeLoaded(dumps(served.about).decode())))
        server = _Server(control, log, parent, served, loader, Path(folder))
        try:
            server.run()
        finally:
            server.end()


def serve_alone(fd: int, loader: str, folder: str) -> None:
    """Load the code and serve requests in this new interpreter, for code that cannot be forked."""
    settle()
    _serve(socket.socket(fileno=fd), _load(loader, Path(folder)), Path(folder))


def _load(loader: str, folder: Path) -> Served:
    module, _, function = loader.partition(":")
    return getattr(importlib.import_module(module), function)(pickle.loads((folder / SETUP).read_bytes()))


class _Server:
    """Server loop that forks processes, kills them, and reports their ends."""

    def __init__(self, control: Channel, log: int, parent: int, served: Served, loader: str, folder: Path) -> None:
        self._control, self._log, self._parent, self._folder = control, Log(log), parent, folder
        self._served, self._loader = served, loader
        self._running: dict[int, ProcessOutput] = {}  # by process id
        self._outputs: dict[int, ProcessOutput] = {}  # by descriptor
        self._interpreters: dict[int, subprocess.Popen[bytes]] = {}  # references kept so `subprocess` does not reap
        self._bell, self._ring = socket.socketpair()
        self._ring.setblocking(False)
        self._bell.setblocking(False)
        signal.set_wakeup_fd(self._ring.fileno())
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._poll = select.poll()  # `select` rejects descriptors above 1023, and the run may have more open
        for end in (self._control, self._bell):
            self._poll.register(end, select.POLLIN)

    def run(self) -> None:
        while True:
            ready = self._wait(ORPHAN_CHECK_S)
            if os.getppid() != self._parent:
                return
            if self._bell.fileno() in ready:
                self._bell.recv(4096)
                self._reap()
            if self._control.fileno() in ready and not self._run_commands():
                return

    def _wait(self, limit_s: float) -> set[int]:
        """Wait until a descriptor can be read, forward the output of processes, and return the readable descriptors."""
        ready = {descriptor for descriptor, _ in self._poll.poll(1000 * limit_s)}
        for descriptor in ready & self._outputs.keys():
            if not self._outputs[descriptor].forward():
                self._poll.unregister(self._outputs.pop(descriptor))  # the process has closed its streams
        return ready

    def _run_commands(self) -> bool:
        command, fds = b"", list[int]()
        while len(command) < COMMAND.size:
            arrived, more, _, _ = socket.recv_fds(self._control.socket, COMMAND.size - len(command), 1)
            if not arrived:
                return False
            command, fds = command + arrived, fds + more
        kind, pid = COMMAND.unpack(command)
        if kind == FORK:
            end = socket.socket(fileno=fds[0])
            try:
                self._control.send(dumps(ProcessForked(self._make(end))))
            except OSError as error:
                self._control.send(dumps(ProcessForked(-1, str(error))))
            finally:
                end.close()
        elif pid in self._running and kind == SHOW:
            with suppress(ProcessLookupError):
                os.kill(pid, SHOW_SIGNAL)
        elif pid in self._running:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return True

    def _make(self, end: socket.socket) -> int:
        """Start a process that serves the requests of a socket, and return its id."""
        output = ProcessOutput(self._log)
        try:
            pid = self._start(end, output)
        except OSError:
            output.close()
            raise
        finally:
            os.close(output.inlet)
        self._running[pid] = self._outputs[output.fileno()] = output
        self._poll.register(output, select.POLLIN)
        return pid

    def _start(self, end: socket.socket, output: ProcessOutput) -> int:
        if threading.active_count() > 1 or not self._served.forkable:
            code = (
                f"import sys; sys.path[:] = {sys.path!r}; from jaxrlhf.processes.forking import serve_alone; "
                f"serve_alone({end.fileno()}, {self._loader!r}, {str(self._folder)!r})"
            )
            command = [sys.executable, "-u", "-c", code]
            streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": output.inlet, "stderr": output.inlet}
            made = subprocess.Popen(command, pass_fds=[end.fileno()], **streams)
            self._interpreters[made.pid] = made
            return made.pid
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if not pid:
            self._serve_forked(end, output)
        return pid

    def _serve_forked(self, end: socket.socket, output: ProcessOutput) -> NoReturn:
        status = 1
        try:
            os.dup2(output.inlet, STDOUT)
            os.dup2(output.inlet, STDERR)
            os.close(output.inlet)
            self._log.close()
            for one in (output, *self._running.values()):
                one.close()
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for inherited in (self._control, self._bell, self._ring):
                inherited.close()
            _serve(end, self._served, self._folder)
            status = 0
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            with suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(status)

    def _reap(self) -> None:
        """Report processes that have ended, after killing the descendants that they left behind."""
        ended: list[tuple[ProcessEnded, ProcessOutput]] = []
        with suppress(ChildProcessError):
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                if (output := self._running.pop(found[0], None)) is not None:
                    one = ProcessEnded(found[0], os.waitstatus_to_exitcode(found[1]))
                    ended.append((one, output))
                    if one.pid in self._interpreters:
                        self._interpreters.pop(one.pid).returncode = one.status
        if ended:
            self._end_orphans()
            for one, output in ended:
                self._finish(one.pid, output)
                remove(temporary_folder(self._folder, one.pid))
                self._control.send(dumps(one))

    def _finish(self, pid: int, output: ProcessOutput) -> None:
        """Forward the last output of a process that has ended."""
        if self._outputs.pop(output.fileno(), None) is not None:
            self._poll.unregister(output)
        output.finish(pid)

    def _end_orphans(self) -> None:
        """Kill the orphans that this process has adopted: a live worker adopts its own, so their worker is dead."""
        for _ in range(MOST_ROUNDS):
            orphans = [pid for pid in children(os.getpid()) if pid not in self._running]
            if not orphans:
                return
            for orphan in orphans:
                kill([*descendants(orphan, b""), orphan])
                with suppress(ChildProcessError):
                    os.waitpid(orphan, 0)

    def end(self) -> None:
        """End all processes; kill the processes that do not end by themselves."""
        signal.set_wakeup_fd(-1)
        for end in (self._control, self._bell):
            self._poll.unregister(end)
        deadline_s = time.monotonic() + GRACE_S
        with suppress(ChildProcessError):
            while self._running and time.monotonic() < deadline_s:
                pid = os.waitpid(-1, os.WNOHANG)[0]
                if (output := self._running.pop(pid, None)) is not None:
                    self._finish(pid, output)
                    deadline_s = time.monotonic() + GRACE_S
                elif not pid:
                    self._wait(0.02)
        for _ in range(MOST_ROUNDS):
            left = descendants(os.getpid(), b"")
            kill(left)
            with suppress(ChildProcessError):
                while os.waitpid(-1, 0)[0]:
                    pass
            if not left:
                break
        for pid, output in self._running.items():
            self._finish(pid, output)
        remove(self._folder)


def temporary_folder(folder: Path, pid: int) -> Path:
    return folder / str(pid)


def _serve(end: socket.socket, served: Served, folder: Path) -> None:
    with suppress(PermissionError):  # this process leads a session already
        os.setsid()
    adopt_orphans()
    end_with_parent()
    show_stack_on_signal()
    own = temporary_folder(folder, os.getpid())
    own.mkdir(exist_ok=True)
    os.environ["TMPDIR"] = tempfile.tempdir = str(own)
    with suppress(EOFError, ConnectionError):  # the run closes the channel to end this process
        served.serve(Channel(end, largest=LARGEST_REQUEST, blocking=True))
