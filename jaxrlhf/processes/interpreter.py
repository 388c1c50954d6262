"""New Python interpreters that run user code alongside the run, and that are ended with all their descendants."""

import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from pathlib import Path

from jaxrlhf.processes.descendants import descendants, kill

STDERR = 2
MARK = "JAXRLHF_PROCESS"  # environment variable that identifies an interpreter's descendants


class Interpreter:
    """New Python interpreter. A fork or a copy of `__main__` would carry JAX along.

    Args:
      code: Program that the interpreter runs, with this process's `sys.path`.
      fd: File descriptor that the interpreter inherits.
      output: File that receives the interpreter's output; None is the standard error stream.
      environment: Environment variables in addition to this process's variables.
    """

    def __init__(
        self, code: str, *, fd: int, output: Path | None = None, environment: Mapping[str, str] | None = None
    ) -> None:
        mark = secrets.token_hex(16)
        self._mark = f"{MARK}={mark}".encode()
        with open(output, "ab") if output else nullcontext(STDERR) as sink:
            self.process = subprocess.Popen(
                [sys.executable, "-u", "-c", f"import sys; sys.path[:] = {sys.path!r}; {code}"],
                pass_fds=[fd],
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=sink,
                # A function that uses JAX must not take the accelerator.
                env={**os.environ, "JAX_PLATFORMS": "cpu", **(environment or {}), MARK: mark},
                start_new_session=True,  # not signaled with the run's group; can be killed together with its children
            )

    @property
    def pid(self) -> int:
        return self.process.pid

    def end(self, *, patience_s: float) -> str:
        """Wait `patience_s`, kill the process and its descendants, and return a description of how it ended."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(patience_s)
        left = descendants(self.process.pid, self._mark)
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        kill(left)  # descendants in other sessions
        return how_it_ended(self.process.wait())


def how_it_ended(status: int) -> str:
    """Describe the exit status of a process; a status below 0 is minus the signal that ended it."""
    return f"ended by signal {-status} ({signal.strsignal(-status)})" if status < 0 else f"exited with status {status}"
