"""Error for invalid input that the user can fix."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_unchecked: ContextVar[bool] = ContextVar("_unchecked", default=False)


class Refusal(ValueError):
    """Invalid input: settings, data, a checkpoint or devices.

    The message states the input, the expected input and the remedy. Commands print only this one line in place of a
    traceback. In your own code, raise it only if the message is sufficient by itself.
    """


def require(condition: bool, message: str) -> None:
    """Raise `Refusal(message)` unless `condition` holds; does nothing in an `unchecked` block."""
    if not condition and not _unchecked.get():
        raise Refusal(message)


def reason_of(error: BaseException) -> str:
    """Return the first line of an error's message, or its class name if the message is empty."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


@contextmanager
def unchecked() -> Iterator[None]:
    """Skip checks while contradictory settings are built; the caller has to build them again with checks."""
    token = _unchecked.set(True)
    try:
        yield
    finally:
        _unchecked.reset(token)


def checking() -> bool:
    """Return False in an `unchecked` block, else True."""
    return not _unchecked.get()
