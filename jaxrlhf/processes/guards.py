"""Guards around calls of user code, in the process that makes the calls."""

import builtins
import faulthandler
import gc
import locale
import os
import resource
import signal
import socket
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

SHOW_SIGNAL = signal.SIGUSR2  # a process prints its stack
_HANDLED = tuple(
    getattr(signal, f"SIG{name}")
    for name in ("ALRM", "CHLD", "HUP", "INT", "PIPE", "PROF", "QUIT", "TERM", "USR1", "USR2", "VTALRM", "WINCH")
)
_TIMERS = signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF
_LIMITS = tuple({getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")})


def settle() -> None:
    """Ignore Ctrl-C, which the parent handles, and make this process the first to be killed when memory runs out."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with suppress(OSError):  # raised on systems other than Linux
        Path("/proc/self/oom_score_adj").write_text("1000")


def show_stack_on_signal() -> None:
    """Let this process print its stack at `SHOW_SIGNAL`, also after another handler replaced the one that prints."""
    faulthandler.unregister(SHOW_SIGNAL)
    faulthandler.register(SHOW_SIGNAL, file=2)


class _Setting(NamedTuple):
    """Part of a process's state: its name in messages, a function that reads it, and a function that sets it."""

    name: str
    get: Callable[[], Any]
    set: Callable[[Any], object]


def _timers() -> list[bool]:
    return [signal.getitimer(timer)[0] > 0 for timer in _TIMERS]


def _end_timers(_: Any) -> None:
    for timer in _TIMERS:
        signal.setitimer(timer, 0)


def _handlers() -> list[Any]:
    return [signal.getsignal(number) for number in _HANDLED]


def _set_handlers(kept: Sequence[Any]) -> None:
    for number, handler in zip(_HANDLED, kept, strict=True):
        if handler is not None:  # else it was not set by Python
            signal.signal(number, handler)
    show_stack_on_signal()


def _environment() -> tuple[Any, ...]:
    variables = os.environ._data  # type: ignore[attr-defined]  # a public copy takes 50 times as long
    return {**variables}, time.tzname, time.timezone


def _set_environment(kept: tuple[Any, ...]) -> None:
    os.environb.clear()
    os.environb.update(kept[0])
    time.tzset()


def _file_mask() -> int:
    mask = os.umask(0o22)
    os.umask(mask)
    return mask


def _set_limits(kept: Sequence[tuple[int, int]]) -> None:
    for limit, values in zip(_LIMITS, kept, strict=True):
        resource.setrlimit(limit, values)


def _set_collection(kept: tuple[bool, tuple[int, int, int]]) -> None:
    gc.enable() if kept[0] else gc.disable()
    gc.set_threshold(*kept[1])


def _set_tracers(kept: tuple[Any, Any]) -> None:
    sys.settrace(kept[0])
    sys.setprofile(kept[1])


def _set_filters(kept: Sequence[Any]) -> None:
    warnings.filters[:] = kept  # type: ignore[index]
    with warnings.catch_warnings():  # its end makes Python look at the filters again
        pass


_SETTINGS = (
    _Setting("the recursion limit", sys.getrecursionlimit, sys.setrecursionlimit),
    _Setting("a timer", _timers, _end_timers),  # before the handlers of their signals
    _Setting("a signal handler", _handlers, _set_handlers),
    _Setting(
        "the mask of signals",
        partial(signal.pthread_sigmask, signal.SIG_BLOCK, ()),
        partial(signal.pthread_sigmask, signal.SIG_SETMASK),
    ),
    _Setting(
        "a standard stream",
        lambda: (sys.stdin, sys.stdout, sys.stderr),
        lambda kept: vars(sys).update(zip(("stdin", "stdout", "stderr"), kept, strict=True)),
    ),
    _Setting("the module path", lambda: list(sys.path), lambda kept: setattr(sys, "path", list(kept))),
    _Setting("the environment", _environment, _set_environment),
    _Setting("the temporary folder", lambda: tempfile.tempdir, partial(setattr, tempfile, "tempdir")),
    _Setting("the mask of new files", _file_mask, os.umask),
    _Setting("a resource limit", lambda: [resource.getrlimit(limit) for limit in _LIMITS], _set_limits),
    _Setting("the priority", partial(os.getpriority, os.PRIO_PROCESS, 0), partial(os.setpriority, os.PRIO_PROCESS, 0)),
    _Setting("the time limit of sockets", socket.getdefaulttimeout, socket.setdefaulttimeout),
    _Setting("the locale", partial(locale.setlocale, locale.LC_ALL), partial(locale.setlocale, locale.LC_ALL)),
    _Setting("the filters of warnings", lambda: list(warnings.filters), _set_filters),
    _Setting("the switch interval", sys.getswitchinterval, sys.setswitchinterval),
    _Setting("the limit of digits", sys.get_int_max_str_digits, sys.set_int_max_str_digits),
    _Setting("garbage collection", lambda: (gc.isenabled(), gc.get_threshold()), _set_collection),
    _Setting("a tracer", lambda: (sys.gettrace(), sys.getprofile()), _set_tracers),
)
"""State of a process that is restored between calls, besides builtins, folders and open files."""


class ProcessState:
    """Snapshot of the state of this process that calls can change, restored for the next call: see `_SETTINGS`.

    Variables of modules are not restored, except builtins.
    """

    def __init__(self) -> None:
        self._builtins, self._modules = dict(vars(builtins)), dict(sys.modules)
        self._folder = os.open(".", getattr(os, "O_PATH", os.O_RDONLY))
        self._own, self._files = tempfile.gettempdir(), _standard_files()
        self._kept = [(setting, setting.get()) for setting in _SETTINGS]

    def restore_builtins(self) -> str:
        """Restore the builtins, before other code uses them, and return the names of the changed ones."""
        now = vars(builtins)
        names = [name for name, kept in self._builtins.items() if now.get(name) is not kept]
        now.update(self._builtins)
        return ", ".join(names)

    def restore(self) -> str:
        """Restore the other state; return a description of what cannot be restored, or an empty text."""
        if len(sys.modules) < len(self._modules):  # emptied; comparing each module at every call would take too long
            sys.modules.update(self._modules | sys.modules)
        for setting, kept in self._kept:
            try:
                if setting.get() != kept:
                    setting.set(kept)
            except Exception:  # such as a hard limit that was lowered, or a deleted attribute of `sys`
                return setting.name
        try:
            os.fchdir(self._folder)
            os.makedirs(self._own, exist_ok=True)
            next_file = os.dup(self._folder)  # the lowest number that is free
            os.close(next_file)
        except OSError as error:
            return f"its folders ({error})"
        if next_file > resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2 > 0:  # -1 is no limit
            return f"its number of open files, {next_file},"
        closed = any(stream is not None and stream.closed for stream in (sys.stdin, sys.stdout, sys.stderr))
        return "a standard stream" if closed or _standard_files() != self._files else ""


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
