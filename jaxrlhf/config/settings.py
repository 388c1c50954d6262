"""Base class of settings, and bounds of their fields."""

import ast
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from types import UnionType
from typing import Annotated, Any, ClassVar, TypeVar, get_args, get_origin, get_type_hints

from jaxrlhf.config.refusal import Refusal, require

Number = TypeVar("Number")
Sized = TypeVar("Sized")


@dataclass(frozen=True)
class Bound:
    """Condition that a number, a text or a tuple has to satisfy.

    Attributes:
      words: Text of the condition in messages, such as "above 0"; follows "must be".
      kind: Types that have the condition. `check_types` refuses other texts and tuples; other numbers, of NumPy or JAX,
        are refused here.
    """

    holds: Callable[[Any], bool]
    words: str
    kind: type | UnionType = int | float

    def refusal(self, value: object) -> str:
        """Return what a value must be, or an empty text if the value is accepted."""
        if isinstance(value, self.kind):
            return "" if self.holds(value) else self.words
        return f"a plain number {self.words}" if self.kind == int | float else ""


def within(low: float, high: float) -> Bound:
    """Return the bound `low <= number <= high`."""
    return Bound(lambda value: low <= value <= high, f"in [{low}, {high}]")


def each(bound: Bound) -> Bound:
    """Return the bound of a tuple that has entries, and whose entries are all within `bound`."""
    words = f"one or more, each {bound.words}"
    return Bound(lambda entries: bool(entries) and all(map(bound.holds, entries)), words, tuple)


FINITE = Bound(math.isfinite, "finite")
NOT_EMPTY = Bound(bool, "non-empty", str | tuple)
REFERENCE = Bound(lambda text: ":" in text, "'module:name' or 'file.py:name'", str)
Positive = Annotated[Number, Bound(lambda value: value > 0, "above 0")]
NotNegative = Annotated[Number, Bound(lambda value: value >= 0, "0 or more")]
Finite = Annotated[Number, FINITE]
Share = Annotated[Number, within(0.0, 1.0)]
BelowOne = Annotated[Number, Bound(lambda value: 0 <= value < 1, "in [0, 1)")]
OneOrMore = Annotated[Number, Bound(lambda value: value >= 1, "1 or more")]
NotEmpty = Annotated[Sized, NOT_EMPTY]
Reference = Annotated[str, REFERENCE]


class Settings:
    """Base class of settings: a frozen dataclass that raises `Refusal` for values outside the bounds of its fields.

    Attributes:
      removed: Settings that an earlier release had, each with advice on what to use instead.
    """

    removed: ClassVar[Mapping[str, str]] = {}

    def __post_init__(self) -> None:
        owner: Any = type(self)
        for name, bounds, optional in _bounds(owner):
            value = getattr(self, name)
            for bound in () if optional and value is None else bounds:
                words = bound.refusal(value)
                require(not words, f"{owner.__name__}.{name} must be {words}{' or None' * optional}, got {value!r}")


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
