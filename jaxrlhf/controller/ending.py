"""How a run ends: asked to by SIGTERM, Ctrl-C or the stop button of a notebook, or by an error."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class Stop:
    """Whether a run shall save and end after the step in progress.

    Attributes:
      step: Number of that step, or of the one that is prepared.
      asked: The run shall end.
      interrupted: By a person, who also wants what comes after the run to be left.
    """

    def __init__(self) -> None:
        self.step, self.asked, self.interrupted = 1, False, False

    def ask(self, *_: Any) -> None:
        """End after the step in progress."""
        self.asked = True

    def interrupt(self, *_: Any) -> None:
        """As `ask`, and say so."""
        self.asked = self.interrupted = True
        print(f"finishing step {self.step}, then saving; press Ctrl-C again to stop at once", flush=True)


@contextmanager
def stopped_by_signals(stop: Stop) -> Iterator[None]:
    """Within the block SIGTERM and the first SIGINT ask to stop; a second SIGINT does what it did before.

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
        yield
    finally:
        signal.signal(signal.SIGTERM, terminated)
        if ours:
            signal.signal(signal.SIGINT, interrupted)


@contextmanager
def afterwards(what: str, end: Callable[[], None]) -> Iterator[None]:
    """Calls `end` after the block; if the block failed, what fails here is a note on what went wrong first."""
    try:
        yield
    except BaseException as error:
        try:
            end()
        except Exception as other:
            error.add_note(f"and {what} failed: {other!r}")
        raise
    end()
