"""Base class of settings, and bounds of their fields."""

import ast
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from types import UnionType
from typing import Annotated, Any, ClassVar, TypeVar, Union, get_args, get_origin, get_type_hints

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
        for name, annotation in _annotations(type(self)).items():
            for words, value in _refused(getattr(self, name), annotation):
                raise Refusal(f"{type(self).__name__}.{name} must be {words}, got {value!r}")


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
def _annotations(owner: Any) -> dict[str, Any]:
    """Return the annotations of a dataclass's fields, bounds included."""
    hints = get_type_hints(owner, include_extras=True)
    return {field.name: hints[field.name] for field in fields(owner)}


def _refused(value: Any, annotation: Any) -> Iterator[tuple[str, object]]:
    """Yield each value out of bounds, of the field or an entry of the field, after what the value must be."""
    members = get_args(annotation)
    if get_origin(annotation) is Annotated:
        for bound in members[1:]:
            if isinstance(bound, Bound) and (words := bound.refusal(value)):
                yield words, value
        yield from _refused(value, members[0])
    elif get_origin(annotation) is tuple and isinstance(value, tuple):
        kinds = members[:1] * len(value) if members[1:] == (Ellipsis,) else members
        for entry, kind in zip(value, kinds, strict=False):  # `check_types` refuses a wrong number of entries
            yield from _refused(entry, kind)
    elif get_origin(annotation) in (Union, UnionType):
        optional = type(None) in members
        for member in () if optional and value is None else members:
            yield from ((words + " or None" * optional, wrong) for words, wrong in _refused(value, member))
