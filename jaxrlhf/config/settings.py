"""Base class of settings, and bounds of their fields."""

import ast
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from types import UnionType
from typing import Annotated, Any, ClassVar, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

from jaxrlhf.config.refusal import Refusal, checking

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


Positive = Annotated[Number, Bound(lambda value: value > 0, "above 0")]
NotNegative = Annotated[Number, Bound(lambda value: value >= 0, "0 or more")]
Finite = Annotated[Number, Bound(math.isfinite, "finite")]
Share = Annotated[Number, within(0.0, 1.0)]
BelowOne = Annotated[Number, Bound(lambda value: 0 <= value < 1, "in [0, 1)")]
OneOrMore = Annotated[Number, Bound(lambda value: value >= 1, "1 or more")]
NotEmpty = Annotated[Sized, Bound(len, "non-empty", str | tuple)]
Reference = Annotated[str, Bound(lambda text: ":" in text, "'module:name' or 'file.py:name'", str)]


class Settings:
    """Base class of settings: a frozen dataclass that raises `Refusal` for values outside the bounds of its fields.

    Attributes:
      removed: Settings that an earlier release had, each with advice on what to use instead.
    """

    removed: ClassVar[Mapping[str, str]] = {}

    def __post_init__(self) -> None:
        if not checking():
            return
        owner: Any = type(self)
        for name, bounds in _bounded(owner):
            for words, value in bounds.refused(getattr(self, name)):
                raise Refusal(f"{owner.__name__}.{name} must be {words}, got {value!r}")


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


class _Bounds(NamedTuple):
    """Bounds of an annotation: of a value, and of each entry of a tuple.

    Attributes:
      repeated: Whether `entries` has a single member, for all entries.
      optional: Whether None is also accepted.
    """

    own: tuple[Bound, ...] = ()
    entries: tuple["_Bounds", ...] = ()
    repeated: bool = False
    optional: bool = False

    @classmethod
    def of(cls, annotation: Any) -> "_Bounds":
        members = get_args(annotation)
        if get_origin(annotation) is Annotated:
            bounds = cls.of(members[0])
            return bounds._replace(own=(*bounds.own, *(one for one in members[1:] if isinstance(one, Bound))))
        if get_origin(annotation) is tuple:
            entries = tuple(cls.of(member) for member in members if member is not Ellipsis)
            return cls(entries=entries, repeated=members[-1:] == (Ellipsis,)) if any(map(any, entries)) else cls()
        if get_origin(annotation) in (Union, UnionType):
            bounded = [bounds for member in members if any(bounds := cls.of(member))]
            return bounded[0]._replace(optional=type(None) in members) if bounded else cls()
        return cls()

    def refused(self, value: Any) -> Iterator[tuple[str, object]]:
        """Yield each value out of bounds, after what the value must be."""
        if self.optional and value is None:
            return
        for bound in self.own:
            if words := bound.refusal(value):
                yield words + " or None" * self.optional, value
        if self.entries and isinstance(value, tuple):  # `check_types` refuses a wrong number of entries
            for entry, bounds in zip(value, self.entries * (len(value) if self.repeated else 1), strict=False):
                yield from bounds.refused(entry)


@cache
def _bounded(owner: Any) -> list[tuple[str, _Bounds]]:
    """Return the bounded fields of a dataclass, by name."""
    hints = get_type_hints(owner, include_extras=True)
    found = [(field.name, _Bounds.of(hints[field.name])) for field in fields(owner)]
    return [(name, bounds) for name, bounds in found if bounds.own or bounds.entries]
