"""Signals that end a run: SIGTERM, Ctrl-C and the stop button of a notebook."""

import _thread
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

AGAIN_S = 0.1
"""Seconds until an interrupt that Python dropped is sent again."""


class Stop:
    """Request to save and end the run after the step in progress.

    Attributes:
      step: Number of the step in progress or in preparation.
      asked: True if the run has to end.
      interrupted: True if a person pressed Ctrl-C, so nothing that follows the run should start.
    """

    def __init__(self) -> None:
        self.step, self.asked, self.interrupted = 1, False, False

    def ask(self, *_: Any) -> None:
        """Request the end after the step in progress."""
        self.asked = True

    def interrupt(self, *_: Any) -> None:
        """Request the end on behalf of a person, and print that the step in progress is finished first."""
        self.asked = self.interrupted = True
        # In a pipe, the same Ctrl-C ends `tee`; and the step in progress may be printing at this very moment.
        with suppress(OSError, RuntimeError):
            print(f"finishing and saving step {self.step}; press Ctrl-C again to stop immediately", flush=True)


@contextmanager
def stopped_by_signals(stop: Stop) -> Iterator[None]:
    """Make SIGTERM and the first SIGINT request a stop within the block; a second SIGINT raises KeyboardInterrupt.

    The KeyboardInterrupt is sent again if Python drops it. Signals are left alone outside the main thread, as is a
    SIGINT that is ignored or has a handler of the user.
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
    """Send SIGINT to the main thread again if Python drops its KeyboardInterrupt within the block.

    A signal handler raises wherever the main thread happens to be. In a `__del__`, or in a callback of the garbage
    collector such as JAX's, nobody can catch the exception, and Python only calls `sys.unraisablehook`.
    """
    before, main, left = sys.unraisablehook, threading.main_thread().ident, threading.Event()
    assert main is not None

    def again() -> None:
        if not left.wait(AGAIN_S):
            signal.pthread_kill(main, signal.SIGINT)  # also wakes a waiting main thread

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
