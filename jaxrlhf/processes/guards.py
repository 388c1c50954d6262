"""Guards around calls of user code, in the process that makes the calls."""

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
    """Ignore Ctrl-C, which the parent handles, and make this process the first to be killed when memory runs out."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with suppress(OSError):  # raised on systems other than Linux
        Path("/proc/self/oom_score_adj").write_text("1000")


class Watchdog:
    """Watchdog that ends the process when a call exceeds the time limit, and prints the call's stack.

    `faulthandler` watches from a C thread, so a hanging call is ended even if it holds the interpreter lock, blocks
    signals or outlives the parent. Arming starts that thread, which costs more than most calls, so consecutive short
    calls share one arming: a call is ended between `limit_s` and `limit_s + SLACK_S` after it began.
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
    """Snapshot of the builtins, restored after each call."""

    def __init__(self) -> None:
        self._kept = dict(vars(builtins))

    @contextmanager
    def kept(self, changed: Callable[[str], None]) -> Iterator[None]:
        """Restore builtins that the block changes, before other code uses them.

        Args:
          changed: Callback, receives the names of the changed builtins.
        """
        try:
            yield
        finally:
            now = vars(builtins)
            names = [name for name in self._kept if now.get(name) is not self._kept[name]]
            now.update(self._kept)
            if names:
                changed(", ".join(names))
