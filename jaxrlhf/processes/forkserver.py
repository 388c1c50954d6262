"""Client of a fork server (`forking.py`), in the process of the run."""

import os
import pickle
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import get_args

from jaxrlhf.processes.channel import Channel
from jaxrlhf.processes.descendants import descendants, kill
from jaxrlhf.processes.folders import remove
from jaxrlhf.processes.forking import COMMAND, FORK, SETUP, CodeLoaded, CodeRefused, ProcessEnded, ProcessForked
from jaxrlhf.processes.jobs import Code
from jaxrlhf.processes.output import STDERR, Log, ProcessOutput
from jaxrlhf.processes.plain import loads

LARGEST_MESSAGE = 1 << 24  # of the server
MOST_FORKS = 32  # open fork requests: the sockets sent with them fill the control socket's buffer
GRACE_S = 15.0  # for the server to end its processes
MARK = "JAXRLHF_PROCESS"  # environment variable that identifies the server's descendants

Message = CodeLoaded | CodeRefused | ProcessForked | ProcessEnded


class ForkServer:
    """Client of the fork server of one piece of user code; only `end` blocks.

    The server is a new interpreter: a fork of this process, or a copy of its `__main__`, would carry JAX along.

    Args:
      output: File that receives the output of the processes; None is the standard error stream.

    Attributes:
      control: Channel of the server.
      output: Output of the server's own process, where the user code is imported.
    """

    def __init__(self, code: Code, output: Path | None) -> None:
        self._code, self._mark = code, secrets.token_hex(16)
        self._folder = Path(tempfile.mkdtemp(prefix="jaxrlhf_"))
        self._asked: deque[Channel] = deque()
        self._unsent: deque[bytes] = deque()
        (self._folder / SETUP).write_bytes(pickle.dumps(code.setup))
        ours, theirs = socket.socketpair()
        log = os.open(output, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666) if output else os.dup(STDERR)
        self._log = Log(log)
        self.output = ProcessOutput(self._log)
        program = (
            f"import sys; sys.path[:] = {sys.path!r}; from jaxrlhf.processes.forking import main; "
            f"main({theirs.fileno()}, {log}, {os.getpid()}, {code.loader!r}, {str(self._folder)!r})"
        )
        # A function that uses JAX must not take the accelerator.
        own = {"JAX_PLATFORMS": "cpu", **code.environment, "TMPDIR": str(self._folder), MARK: self._mark}
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-u", "-c", program],
                pass_fds=[theirs.fileno(), log],
                stdin=subprocess.DEVNULL,
                stdout=self.output.inlet,
                stderr=self.output.inlet,
                env={**os.environ, **own},
                start_new_session=True,  # not signaled with the group of the run, and killed together with its children
            )
        except BaseException:
            ours.close()
            self.output.close()
            self._log.close()
            remove(self._folder)
            raise
        finally:
            theirs.close()
            os.close(self.output.inlet)
        self._ended: str | None = None
        self.control = Channel(ours, largest=LARGEST_MESSAGE, blocking=False)

    def fileno(self) -> int:
        return self.control.fileno()

    @property
    def asked(self) -> int:
        """Number of open fork requests."""
        return len(self._asked)

    def fork(self) -> None:
        """Request a process; after the answering `ProcessForked`, `take` returns the channel of the process.

        Raises:
          OSError: The server is gone, or too many requests are open.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                socket.send_fds(self.control.socket, [COMMAND.pack(FORK, 0)], [theirs.fileno()])
            except OSError:
                ours.close()
                raise
        self._asked.append(Channel(ours, largest=self._code.largest_answer, blocking=False))

    def take(self) -> Channel:
        """Return the channel of the process that the latest `ProcessForked` reported."""
        return self._asked.popleft()

    def command(self, kind: bytes, pid: int) -> None:
        """Request that a process prints its stack (`SHOW`) or is killed (`END`, which `ProcessEnded` answers).

        Raises:
          OSError: The server is gone.
        """
        self._unsent.append(COMMAND.pack(kind, pid))
        self._send_commands()

    def _send_commands(self) -> None:
        with suppress(BlockingIOError):  # the server is busy; receiving its next answers calls this method again
            while self._unsent:
                self.control.socket.send(self._unsent[0])
                self._unsent.popleft()

    def receive(self) -> list[Message]:
        """Return the server's messages that have arrived.

        Raises:
          EOFError, Garbled, OSError: The server is gone.
        """
        messages = [loads(message, get_args(Message)) for message in self.control.receive()]
        self._send_commands()
        return messages

    def close(self) -> None:
        """Tell the server to end its processes and itself."""
        self.control.close()
        for channel in self._asked:
            channel.close()

    def end(self, *, patience_s: float) -> str:
        """Wait `patience_s`, end the server and all its processes, and return a description of how the server ended."""
        if self._ended is None:
            self._ended = self._end(time.monotonic() + patience_s)
        return self._ended

    def _end(self, deadline_s: float) -> str:
        self.close()
        while self._process.poll() is None and time.monotonic() < deadline_s:
            if not self.output.forward():  # a full pipe would keep the server from ending
                time.sleep(0.01)
        left = descendants(self._process.pid, f"{MARK}={self._mark}".encode())
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        kill(left)  # descendants in other sessions
        remove(self._folder)
        status = self._process.wait()
        self.output.finish(self._process.pid)
        self._log.close()
        return how_it_ended(status)


def how_it_ended(status: int) -> str:
    """Describe the exit status of a process; a status below 0 is minus the signal that ended it."""
    return f"ended by signal {-status} ({signal.strsignal(-status)})" if status < 0 else f"exited with status {status}"
