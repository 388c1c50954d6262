"""Client of a fork server (`forking.py`), in the process of the run."""

import os
import pickle
import socket
import tempfile
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, get_args

from jaxrlhf.processes.channel import Channel
from jaxrlhf.processes.folders import remove
from jaxrlhf.processes.forking import (
    COMMAND,
    END,
    FORK,
    SETUP,
    SHOW,
    CodeLoaded,
    CodeRefused,
    ProcessEnded,
    ProcessForked,
)
from jaxrlhf.processes.interpreter import Interpreter
from jaxrlhf.processes.plain import loads

LARGEST_MESSAGE = 1 << 24  # of the server
MOST_FORKS = 32  # open fork requests: the sockets sent with them fill the control socket's buffer
GRACE_S = 15.0  # for the server to end its processes

Message = CodeLoaded | CodeRefused | ProcessForked | ProcessEnded


class ForkServer:
    """Client of the fork server of one piece of user code; only `end` blocks.

    Args:
      loader: `module:function` that loads the code in the server; see `forking.main`.
      setup: Argument of the loader.
      output: File that receives the output of the processes; None is the standard error stream.
      environment: Environment variables in addition to this process's variables.
      largest: Maximum size of a worker process's answer in bytes.
    """

    def __init__(
        self, loader: str, setup: Any, output: Path | None, *, environment: Mapping[str, str], largest: int
    ) -> None:
        self._largest = largest
        self._folder = Path(tempfile.mkdtemp(prefix="jaxrlhf_"))
        self._asked: deque[Channel] = deque()
        self._unsent: deque[bytes] = deque()
        (self._folder / SETUP).write_bytes(pickle.dumps(setup))
        ours, theirs = socket.socketpair()
        with theirs:
            self._interpreter = Interpreter(
                f"from jaxrlhf.processes.forking import main; "
                f"main({theirs.fileno()}, {os.getpid()}, {loader!r}, {str(self._folder)!r})",
                fd=theirs.fileno(),
                output=output,
                environment={**environment, "TMPDIR": str(self._folder)},
            )
        self.control = Channel(ours, largest=LARGEST_MESSAGE, blocking=False)

    @property
    def pid(self) -> int:
        return self._interpreter.pid

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
        self._asked.append(Channel(ours, largest=self._largest, blocking=False))

    def take(self) -> Channel:
        """Return the channel of the process that the latest `ProcessForked` reported."""
        return self._asked.popleft()

    def show_stack(self, pid: int) -> None:
        """Request that a process prints its stack.

        Raises:
          OSError: The server is gone.
        """
        self._command(SHOW, pid)

    def end_process(self, pid: int) -> None:
        """Request that a process is killed; `ProcessEnded` answers.

        Raises:
          OSError: The server is gone.
        """
        self._command(END, pid)

    def _command(self, kind: bytes, pid: int) -> None:
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
        """End the server and all its processes; return a description of how the server ended."""
        self.close()
        try:
            return self._interpreter.end(patience_s=patience_s)
        finally:
            remove(self._folder)
