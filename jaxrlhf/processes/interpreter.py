"""Plain interpreters that run code of users: started beside the run, and ended with all that they leave behind."""

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
MARK = "JAXRLHF_PROCESS"  # the variable that tells an interpreter's own descendants


class Interpreter:
    """A new interpreter, not a fork or a copy of `__main__`, both of which would carry JAX.

    Args:
      code: Program that it runs, with this process's `sys.path`.
      fd: Descriptor that it inherits.
      output: File that receives what it prints; None is the standard error stream.
      environment: Variables beside this process's own.
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
                start_new_session=True,  # signals to the run's group pass it by; it can be killed with its children
            )

    @property
    def pid(self) -> int:
        return self.process.pid

    def end(self, *, patience_s: float) -> str:
        """Reap the process, by force if it outlives `patience_s`, and what it left behind; says how it ended."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(patience_s)
        left = descendants(self.process.pid, self._mark)
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        kill(left)  # those in sessions of their own
        return how_it_ended(self.process.wait())


def how_it_ended(status: int) -> str:
    """Words for the status of a process; below 0 it is minus the signal that ended it."""
    return f"ended by signal {-status} ({signal.strsignal(-status)})" if status < 0 else f"exited with status {status}"
