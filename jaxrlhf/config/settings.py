"""Base class of settings, and bounds of numeric fields."""

import ast
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from typing import Annotated, Any, ClassVar, TypeVar, get_args, get_origin, get_type_hints

from jaxrlhf.config.refusal import Refusal, require

Number = TypeVar("Number")


@dataclass(frozen=True)
class Bound:
    """Condition that a number has to satisfy.

    Attributes:
      words: Text of the condition in messages, such as "above 0"; follows "must be".
    """

    holds: Callable[[float], bool]
    words: str


def within(low: float, high: float) -> Bound:
    """Return the bound `low <= number <= high`."""
    return Bound(lambda value: low <= value <= high, f"in [{low}, {high}]")


Positive = Annotated[Number, Bound(lambda value: value > 0, "above 0")]
NotNegative = Annotated[Number, Bound(lambda value: value >= 0, "0 or more")]
Finite = Annotated[Number, Bound(math.isfinite, "finite")]
Share = Annotated[Number, within(0.0, 1.0)]


class Settings:
    """Base class of settings: a frozen dataclass that raises `Refusal` for numbers outside the bounds of its fields.

    Attributes:
      removed: Settings that an earlier release had, each with advice on what to use instead.
    """

    removed: ClassVar[Mapping[str, str]] = {}

    def __post_init__(self) -> None:
        owner: Any = type(self)
        for name, bounds, optional in _bounds(owner):
            value = getattr(self, name)
            plain = isinstance(value, int | float)  # NumPy and JAX numbers are not plain numbers
            for bound in () if optional and value is None else bounds:
                words = f"{'' if plain else 'a plain number '}{bound.words}{' or None' * optional}"
                require(plain and bound.holds(value), f"{owner.__name__}.{name} must be {words}, got {value!r}")


def literals(arguments: Sequence[str], what: str) -> dict[str, Any]:
    """Parse arguments such as `tokens=4096` into values by name.

    Args:
      what: Name of the setting, for messages.

    Raises:
      Refusal: An argument is not a name and a Python literal.
    """
    found = {}
    for argument in arguments:
        name, _, text = argument.partition("=")
        try:
            found[name.strip()] = ast.literal_eval(text.strip())
        except (ValueError, SyntaxError) as error:
            advice = "give a name and a literal, such as 'consistent_rms=0.2' or \"mode='a'\""
            raise Refusal(f"{what} has {argument!r}; {advice}") from error
    return found


@cache
def _bounds(owner: type) -> list[tuple[str, tuple[Bound, ...], bool]]:
    """Return the bounded fields of a dataclass: name, bounds, and True if the field may be None."""
    hints, found = get_type_hints(owner, include_extras=True), []
    for field in fields(owner):
        members = get_args(hints[field.name]) if get_origin(hints[field.name]) is not Annotated else ()
        optional = type(None) in members
        for member in (hints[field.name], *members):
            bounds = tuple(extra for extra in getattr(member, "__metadata__", ()) if isinstance(extra, Bound))
            if bounds:
                found.append((field.name, bounds, optional))
    return found
