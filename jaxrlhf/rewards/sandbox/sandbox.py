"""Sandbox that runs a Python program in a separate, limited and confined process; see `confined.py`."""

import errno
import fcntl
import json
import logging
import os
import secrets
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from jaxrlhf.config import Refusal
from jaxrlhf.processes.folders import remove_later

MOST_CREATED = 1000
"""Most threads, files and folders, counted together, that one program creates."""

_CONFINED = Path(__file__).with_name("confined.py")
_RECEIVE, _SEND, _CONTINUE = 0xC0502100, 0xC0182101, 1  # ioctl numbers of seccomp, and the answer yes

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Limits:
    """Resource limits of one program.

    Attributes:
      time_s: Wall-clock time in seconds, including the start of the interpreter.
      memory_bytes: Address space in bytes.
      output_bytes: Size in bytes of the printed output, and of any file that the program writes.
      allow_unsandboxed: Run the program even if the machine cannot confine it.
    """

    time_s: float
    memory_bytes: int
    output_bytes: int
    allow_unsandboxed: bool = False


@dataclass(frozen=True)
class Ended:
    """Result of running a program.

    Attributes:
      status: Exit status of the process; None if it was killed at the time limit.
      output: Printed output.
      whole: True if the program and its test ran to the end.
    """

    status: int | None
    output: str
    whole: bool


def run(program: str, *, limits: Limits, stdin: str = "", test: str | None = None) -> Ended:
    """Run `program`, then `test` in the same namespace.

    Args:
      test: Test code; with a test the program's `__name__` is not `__main__`.

    Raises:
      RuntimeError: The machine cannot confine the program and `limits` does not allow that.
    """
    secret = secrets.token_hex(16)  # a program cannot report by accident that it ran to the end
    with (
        _folder("program_") as directory,
        tempfile.TemporaryFile() as job,
        tempfile.TemporaryFile(dir=directory) as given,  # in this folder the program may reopen it as /dev/stdin
        tempfile.TemporaryFile(dir=directory) as printed,
        tempfile.NamedTemporaryFile(prefix="outside_") as outside,
    ):
        given.write(stdin.encode(errors="surrogatepass"))
        given.seek(0)
        description = {
            **vars(limits),
            **{"program": program, "test": test, "secret": secret},
            **{"directory": directory, "outside": outside.name, "parent": os.getpid()},
        }
        job.write(json.dumps(description).encode())
        job.seek(0)
        end = time.monotonic() + limits.time_s
        ours, theirs = socket.socketpair()
        with ours:
            with theirs:
                process = _start((job.fileno(), theirs.fileno()), directory, given.fileno(), printed.fileno())
            status = _wait(process, ours, end)
        job.seek(0)
        whole = job.read() == secret.encode()
        printed.seek(0)
        return Ended(status, printed.read().decode(errors="replace"), whole)


def check_sandbox(limits: Limits) -> None:
    """Check that this machine confines programs.

    Raises:
      Refusal: Programs cannot be confined and `limits` does not allow that, or a small program exceeds the limits.
    """
    probe = "print(len(bytearray(1 << 24)))"
    try:
        ended = run(probe, limits=replace(limits, allow_unsandboxed=False))
    except RuntimeError as error:
        if not limits.allow_unsandboxed:
            raise Refusal(
                f"CodeReward cannot confine programs: {error}. Run it on another machine, or, if you trust what the "
                "model writes with your files and your network, set allow_unsandboxed=True"
            ) from error
        logger.warning("CodeReward runs programs with the rights of this run (allow_unsandboxed=True): %s", error)
        ended = run(probe, limits=limits)
    if ended != Ended(0, "16777216\n", True):
        raise Refusal(f"CodeReward: a program that takes 16 MiB ended so: {ended}; are its limits too low? {limits}")


@contextmanager
def _folder(prefix: str) -> Iterator[str]:
    """Create a temporary folder; its removal runs in the background if a program has left files in it."""
    folder = tempfile.mkdtemp(prefix=prefix)
    try:
        yield folder
    finally:
        try:
            os.rmdir(folder)
        except OSError:  # not empty
            remove_later(folder)


def _start(kept_open: tuple[int, int], directory: str, given: int, printed: int) -> subprocess.Popen:
    kept = {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}
    single = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-I", "-B", str(_CONFINED), *map(str, kept_open)],
        cwd=directory,
        env={"LANG": "C.UTF-8", "HOME": directory, "TMPDIR": directory, **single, **kept},
        stdin=given,
        stdout=printed,
        stderr=subprocess.DEVNULL,
        pass_fds=kept_open,
        start_new_session=True,  # an unsandboxed program's children are killed with it
    )


def _wait(process: subprocess.Popen, child: socket.socket, end: float) -> int | None:
    """Answer the filter until the program ends, and return the exit status; None if it was killed at time `end`."""
    try:
        child.settimeout(max(end - time.monotonic(), 1e-3))
        message, listeners, _, _ = socket.recv_fds(child, 4096, 1)
        if not listeners and message:
            raise RuntimeError(message.decode(errors="replace"))
        for fd in listeners:
            with open(fd, "rb", buffering=0) as listener:
                _answer(listener.fileno(), process.pid, end)
        return process.wait(max(end - time.monotonic(), 0))
    except (TimeoutError, subprocess.TimeoutExpired):
        return None
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _answer(listener: int, pid: int, end: float) -> None:
    """Allow the first `MOST_CREATED` calls that seccomp asks for, until the process ends or time `end` is reached."""
    with open(os.pidfd_open(pid), "rb", buffering=0) as ended:
        poll, created = select.poll(), 0
        poll.register(listener, select.POLLIN)
        poll.register(ended, select.POLLIN)
        while (left_s := end - time.monotonic()) > 0:
            ready = {fd for fd, _ in poll.poll(left_s * 1000)}
            if ended.fileno() in ready:
                return
            if ready:
                created += 1
                error, flags = (0, _CONTINUE) if created <= MOST_CREATED else (-errno.EAGAIN, 0)
                with suppress(FileNotFoundError):  # the asking thread has ended
                    number = fcntl.ioctl(listener, _RECEIVE, bytes(80))[:8]
                    fcntl.ioctl(listener, _SEND, number + struct.pack("qiI", 0, error, flags))
