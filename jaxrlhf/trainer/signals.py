"""Signals that end a run: SIGTERM, Ctrl-C and the stop button of a notebook."""

import _thread
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

AGAIN_S = 0.1
"""Seconds until an interrupt that Python dropped comes again."""


class Stop:
    """A request that the run save and end after the step in progress.

    Attributes:
      step: Number of the step in progress, or of the one that is prepared.
      asked: True if the run shall end.
      interrupted: True if a person asked, who also wants what comes after the run to be left.
    """

    def __init__(self) -> None:
        self.step, self.asked, self.interrupted = 1, False, False

    def ask(self, *_: Any) -> None:
        """End after the step in progress."""
        self.asked = True

    def interrupt(self, *_: Any) -> None:
        """End after the step in progress, and print that."""
        self.asked = self.interrupted = True
        # In a pipe, `tee` ends by the same Ctrl-C; and the step in progress may be writing at this very moment.
        with suppress(OSError, RuntimeError):
            print(f"finishing step {self.step}, then saving; press Ctrl-C again to stop at once", flush=True)


@contextmanager
def stopped_by_signals(stop: Stop) -> Iterator[None]:
    """Have SIGTERM and the first SIGINT ask to stop within the block; a second SIGINT does what it did before.

    That is to raise KeyboardInterrupt, which is not lost here where Python would drop it.
    Outside the main thread signals are left alone, and so is a SIGINT that is ignored or has a handler of the user's.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    terminated, interrupted = signal.signal(signal.SIGTERM, stop.ask), signal.getsignal(signal.SIGINT)

    def first_interrupt(*_: Any) -> None:
        signal.signal(signal.SIGINT, interrupted)
        stop.interrupt()

    ours = interrupted is signal.default_int_handler
    if ours:
        signal.signal(signal.SIGINT, first_interrupt)
    try:
        with _dropped_interrupts_come_again() if ours else nullcontext():
            yield
    finally:
        signal.signal(signal.SIGTERM, terminated)
        if ours:
            signal.signal(signal.SIGINT, interrupted)


@contextmanager
def _dropped_interrupts_come_again() -> Iterator[None]:
    """Send the main thread a SIGINT again, within the block, whose KeyboardInterrupt went nowhere.

    A handler raises wherever the main thread happens to be. In a callback of the garbage collector, as JAX has one, or
    in a `__del__` nobody can catch that; all that Python does is to tell `sys.unraisablehook`.
    """
    before, main, left = sys.unraisablehook, threading.main_thread().ident, threading.Event()
    assert main is not None

    def again() -> None:
        if not left.wait(AGAIN_S):
            signal.pthread_kill(main, signal.SIGINT)  # wakes it where it waits, too

    def dropped(what: "sys.UnraisableHookArgs") -> None:
        if what.exc_type is KeyboardInterrupt and threading.get_ident() == main:
            _thread.start_new_thread(again, ())  # a `Thread` takes locks, which the main thread may hold here
        else:
            before(what)

    sys.unraisablehook = dropped
    try:
        yield
    finally:
        left.set()
        sys.unraisablehook = before
