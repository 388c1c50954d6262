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
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, Protocol

from jaxrlhf.config import Refusal
from jaxrlhf.processes.channel import Channel
from jaxrlhf.processes.descendants import adopt_orphans, children, descendants, end_with_parent, kill
from jaxrlhf.processes.folders import remove
from jaxrlhf.processes.guards import settle
from jaxrlhf.processes.plain import dumps

COMMAND = struct.Struct("!cq")  # FORK, sent along with a socket, or SHOW or END and a process id
FORK, SHOW, END = b"F", b"S", b"E"
LARGEST_REQUEST = 1 << 30
SETUP = "setup"
STDERR = 2
SHOW_SIGNAL = signal.SIGUSR2  # a process prints its stack
ORPHAN_CHECK_S = 5.0
GRACE_S = 1.0  # for processes to end by themselves once the run is gone
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


def main(fd: int, parent: int, loader: str, folder: str) -> None:
    """Serve the socket at `fd` until it closes or the process `parent` is gone.

    Args:
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
        server = _Server(control, parent, served, loader, Path(folder))
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

    def __init__(self, control: Channel, parent: int, served: Served, loader: str, folder: Path) -> None:
        self._control, self._parent, self._folder = control, parent, folder
        self._served, self._loader = served, loader
        self._pids: set[int] = set()
        self._interpreters: dict[int, subprocess.Popen[bytes]] = {}  # references kept so `subprocess` does not reap
        self._bell, self._ring = socket.socketpair()
        self._ring.setblocking(False)
        self._bell.setblocking(False)
        signal.set_wakeup_fd(self._ring.fileno())
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def run(self) -> None:
        waiting = select.poll()  # `select` rejects descriptors above 1023, and the run may have more open
        for end in (self._control, self._bell):
            waiting.register(end, select.POLLIN)
        while True:
            ready = {descriptor for descriptor, _ in waiting.poll(1000 * ORPHAN_CHECK_S)}
            if os.getppid() != self._parent:
                return
            if self._bell.fileno() in ready:
                self._bell.recv(4096)
                self._reap()
            if self._control.fileno() in ready and not self._obey():
                return

    def _obey(self) -> bool:
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
                made = self._make(end)
            except OSError as error:
                self._control.send(dumps(ProcessForked(-1, str(error))))
            else:
                self._pids.add(made)
                self._control.send(dumps(ProcessForked(made)))
            finally:
                end.close()
        elif pid in self._pids and kind == SHOW:
            with suppress(ProcessLookupError):
                os.kill(pid, SHOW_SIGNAL)
        elif pid in self._pids:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return True

    def _make(self, end: socket.socket) -> int:
        if threading.active_count() > 1 or not self._served.forkable:
            code = (
                f"import sys; sys.path[:] = {sys.path!r}; from jaxrlhf.processes.forking import serve_alone; "
                f"serve_alone({end.fileno()}, {self._loader!r}, {str(self._folder)!r})"
            )
            command = [sys.executable, "-u", "-c", code]
            made = subprocess.Popen(command, pass_fds=[end.fileno()], stdin=subprocess.DEVNULL)
            self._interpreters[made.pid] = made
            return made.pid
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if not pid:
            self._serve_forked(end)
        return pid

    def _serve_forked(self, end: socket.socket) -> NoReturn:
        status = 1
        try:
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
        ended = []
        with suppress(ChildProcessError):
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                if found[0] in self._pids:
                    self._pids.discard(found[0])
                    ended.append(ProcessEnded(found[0], os.waitstatus_to_exitcode(found[1])))
                    if found[0] in self._interpreters:
                        self._interpreters.pop(found[0]).returncode = ended[-1].status
        if ended:
            self._end_orphans()
            for one in ended:
                remove(temporary_folder(self._folder, one.pid))
                self._control.send(dumps(one))

    def _end_orphans(self) -> None:
        """Kill the orphans that this process has adopted: a live worker adopts its own, so their worker is dead."""
        for _ in range(MOST_ROUNDS):
            orphans = [pid for pid in children(os.getpid()) if pid not in self._pids]
            if not orphans:
                return
            for orphan in orphans:
                kill([*descendants(orphan, b""), orphan])
                with suppress(ChildProcessError):
                    os.waitpid(orphan, 0)

    def end(self) -> None:
        """End all processes; kill the processes that do not end by themselves."""
        signal.set_wakeup_fd(-1)
        patience = int(GRACE_S / 0.02)
        with suppress(ChildProcessError):
            while self._pids and patience:
                pid = os.waitpid(-1, os.WNOHANG)[0]
                self._pids.discard(pid)
                if not pid:
                    patience -= 1
                    select.select([], [], [], 0.02)
        for _ in range(MOST_ROUNDS):
            left = descendants(os.getpid(), b"")
            kill(left)
            with suppress(ChildProcessError):
                while os.waitpid(-1, 0)[0]:
                    pass
            if not left:
                break
        remove(self._folder)


def temporary_folder(folder: Path, pid: int) -> Path:
    return folder / str(pid)


def _serve(end: socket.socket, served: Served, folder: Path) -> None:
    with suppress(PermissionError):  # this process leads a session already
        os.setsid()
    adopt_orphans()
    end_with_parent()
    faulthandler.register(SHOW_SIGNAL, file=STDERR)
    own = temporary_folder(folder, os.getpid())
    own.mkdir(exist_ok=True)
    os.environ["TMPDIR"] = tempfile.tempdir = str(own)
    with suppress(EOFError, ConnectionError):  # the run closes the channel to end this process
        served.serve(Channel(end, largest=LARGEST_REQUEST, blocking=True))
