"""Guards around calls of a user's code, in the process that makes them."""

import builtins
import faulthandler
import math
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

SLACK_S = 0.5


def settle() -> None:
    """Have Ctrl-C be the parent's to handle, and this process be the one that ends where memory runs out."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with suppress(OSError):  # of a system that is not Linux
        Path("/proc/self/oom_score_adj").write_text("1000")


class Watchdog:
    """Ends the process when a call takes longer than the limit, and prints where it was.

    `faulthandler` watches from a C thread, so neither a loop that holds the interpreter lock nor blocked signals nor
    the death of the parent keep a call alive that hangs. Arming starts that thread, which costs more than most calls,
    so short calls in a row share one arming: a call is ended between `limit_s` and `limit_s + SLACK_S` after it began.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._armed_at = -math.inf

    def begin_call(self) -> None:
        now = time.monotonic()
        if now - self._armed_at > SLACK_S:
            faulthandler.dump_traceback_later(self._limit_s + SLACK_S, exit=True)
            self._armed_at = now

    def disarm(self) -> None:
        faulthandler.cancel_dump_traceback_later()
        self._armed_at = -math.inf


class Builtins:
    """The builtins as they were, to be put back after each call."""

    def __init__(self) -> None:
        self._kept = dict(vars(builtins))

    @contextmanager
    def kept(self, changed: Callable[[str], None]) -> Iterator[None]:
        """Put builtins back that the block changes, before anything else uses them.

        Args:
          changed: Told the names of those that it changed.
        """
        try:
            yield
        finally:
            now = vars(builtins)
            names = [name for name in self._kept if now.get(name) is not self._kept[name]]
            now.update(self._kept)
            if names:
                changed(", ".join(names))
