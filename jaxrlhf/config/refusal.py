"""The error for input that its giver can mend, and the checks that settings run on themselves."""

import math


class Refusal(ValueError):
    """Input that does not fit: settings, data, a checkpoint, devices.

    Its message says what was given, what was expected and what to do. Commands print that one line in place of a
    traceback, so raise it in code of your own only where the message says it all.
    """


def require(condition: bool, message: str) -> None:
    """Raise `Refusal(message)` unless `condition` holds."""
    if not condition:
        raise Refusal(message)


def positive(owner: object, *names: str) -> None:
    """Require the named fields of `owner` to be numbers above 0."""
    for name in names:
        value = getattr(owner, name)
        number = isinstance(value, int | float)
        require(number and value > 0, f"{type(owner).__name__}.{name} must be above 0, got {value!r}")


def not_negative(owner: object, *names: str) -> None:
    """Require the named fields of `owner` to be numbers that are 0 or more."""
    for name in names:
        value = getattr(owner, name)
        number = isinstance(value, int | float)
        require(number and value >= 0, f"{type(owner).__name__}.{name} must be 0 or more, got {value!r}")


def finite(owner: object, *names: str) -> None:
    """Require the named fields of `owner` to be numbers, and neither infinite nor NaN."""
    for name in names:
        value = getattr(owner, name)
        number = isinstance(value, int | float)
        require(number and math.isfinite(value), f"{type(owner).__name__}.{name} must be finite, got {value!r}")


def within(owner: object, name: str, low: float, high: float) -> None:
    """Require `low <= owner.name <= high`."""
    value = getattr(owner, name)
    number = isinstance(value, int | float)
    require(number and low <= value <= high, f"{type(owner).__name__}.{name} must be in [{low}, {high}], got {value!r}")
