"""Error for invalid input that the user can fix."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

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


def read_object(file: Path, remedy: str) -> dict[str, Any]:
    """Read the JSON object of a file.

    Raises:
      Refusal: There is no such file, or it holds something else; the message ends with `remedy`.
    """
    try:
        if not file.is_file():  # reading a pipe would wait for its writer
            raise FileNotFoundError("no regular file" if file.exists() else "no such file")
        fields = json.loads(file.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise Refusal(f"{file} cannot be read as JSON ({reason_of(error)}); {remedy}") from error
    if not isinstance(fields, dict):
        raise Refusal(f"{file} has a {type(fields).__name__}, expected a JSON object; {remedy}")
    return fields


@contextmanager
def reading(file: Path, remedy: str) -> Iterator[None]:
    """Turn errors of a block into a `Refusal`: the object of a file lacks a field, or a field has another type."""
    try:
        yield
    except (KeyError, TypeError, AttributeError) as error:
        raise Refusal(f"{file} has other fields than expected ({error!r}); {remedy}") from error


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
