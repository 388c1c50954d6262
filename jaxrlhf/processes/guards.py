"""Guards around calls of user code, in the process that makes the calls."""

import builtins
import os
import resource
import signal
import sys
import tempfile
from contextlib import suppress
from pathlib import Path


def settle() -> None:
    """Ignore Ctrl-C, which the parent handles, and make this process the first to be killed when memory runs out."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with suppress(OSError):  # raised on systems other than Linux
        Path("/proc/self/oom_score_adj").write_text("1000")


class ProcessState:
    """Snapshot of the state of this process that calls can change, restored for the next call.

    The state is the builtins, the working directory, the environment variables, the temporary folder, the resource
    limits, the recursion limit, the mask of new files, timers, and the output streams.
    """

    def __init__(self) -> None:
        self._builtins = dict(vars(builtins))
        self._folder = os.open(".", getattr(os, "O_PATH", os.O_RDONLY))
        self._environment = dict(os.environ)
        self._temporary, self._own = tempfile.tempdir, tempfile.gettempdir()
        limits = {getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")}
        self._limits = {limit: resource.getrlimit(limit) for limit in limits}
        self._recursion = sys.getrecursionlimit()
        self._streams, self._files = (sys.stdout, sys.stderr), _standard_files()
        self._mask = os.umask(0o22)
        os.umask(self._mask)

    def restore_builtins(self) -> str:
        """Restore the builtins, before other code uses them, and return the names of the changed ones."""
        now = vars(builtins)
        names = [name for name, kept in self._builtins.items() if now.get(name) is not kept]
        now.update(self._builtins)
        return ", ".join(names)

    def restore(self) -> str:
        """Restore the other state; return a description of what cannot be restored, or an empty text."""
        sys.stdout, sys.stderr = self._streams
        sys.setrecursionlimit(self._recursion)
        os.umask(self._mask)
        for timer in (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF):
            signal.setitimer(timer, 0)
        tempfile.tempdir = self._temporary
        if dict(os.environ) != self._environment:
            os.environ.clear()
            os.environ.update(self._environment)
        try:
            os.fchdir(self._folder)
            os.makedirs(self._own, exist_ok=True)
            next_file = os.dup(self._folder)  # the lowest number that is free
            os.close(next_file)
        except OSError as error:
            return f"its folders ({error})"
        try:
            for limit, kept in self._limits.items():
                if resource.getrlimit(limit) != kept:
                    resource.setrlimit(limit, kept)
        except (ValueError, OSError):  # a hard limit was lowered
            return "a resource limit"
        if next_file > self._limits[resource.RLIMIT_NOFILE][0] // 2 > 0:  # -1 is no limit
            return f"its number of open files, {next_file},"
        changed = sys.stdout.closed or sys.stderr.closed or _standard_files() != self._files
        return "its output" if changed else ""


def _standard_files() -> list[tuple[int, int] | None]:
    """Identify the files that are standard input, output and error; None for a closed one."""
    found: list[tuple[int, int] | None] = []
    for number in range(3):
        try:
            state = os.fstat(number)
            found.append((state.st_dev, state.st_ino))
        except OSError:
            found.append(None)
    return found
