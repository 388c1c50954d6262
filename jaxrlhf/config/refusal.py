"""The error for input that its giver can mend."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_unchecked: ContextVar[bool] = ContextVar("_unchecked", default=False)


class Refusal(ValueError):
    """Input that does not fit: settings, data, a checkpoint, devices.

    Its message says what was given, what was expected and what to do. Commands print that one line in place of a
    traceback, so raise it in code of your own only where the message says it all.
    """


def require(condition: bool, message: str) -> None:
    """Raise `Refusal(message)` unless `condition` holds; does nothing in a block of `unchecked`."""
    if not condition and not _unchecked.get():
        raise Refusal(message)


def reason_of(error: BaseException) -> str:
    """The first line that an error says; its class where it says nothing."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


@contextmanager
def unchecked() -> Iterator[None]:
    """Let settings contradict each other while they are made; whoever opens the block makes them again, checked."""
    token = _unchecked.set(True)
    try:
        yield
    finally:
        _unchecked.reset(token)


def checking() -> bool:
    """False in a block of `unchecked`."""
    return not _unchecked.get()
