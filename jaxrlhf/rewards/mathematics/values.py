"""Values of an answer: quantities, lists, sets of numbers, relations, ratios, tables, words."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxrlhf.rewards.mathematics.expressions import Expr, operation


@dataclass(frozen=True)
class Quantity:
    """Number or formula, with its unit, percent sign or number base.

    Attributes:
      unit: Unit or word after the number; empty without a unit.
      percent: True if a percent sign follows the number.
      base: Base of the number system, if it is written as a subscript; else None.
      digits: Digits of the number in this base.
    """

    expr: Expr
    unit: str = ""
    percent: bool = False
    base: int | None = None
    digits: str = ""


@dataclass(frozen=True)
class Compound:
    """One amount in several units, such as 3 hours 20 minutes."""

    parts: tuple[Quantity, ...]


@dataclass(frozen=True)
class Items:
    """Several values: a point, a set or a list.

    Attributes:
      bracket: Both brackets: `{}` for sets, other brackets such as `()` for ordered values; empty for a plain list.
      joiner: `or` or `and` if the word is between the values, else a comma.
    """

    values: tuple[Any, ...]
    bracket: str = ""
    joiner: str = field(default=",", compare=False)


@dataclass(frozen=True)
class RealInterval:
    """Interval of real numbers; `has_low` and `has_high` are True if the end belongs to the interval."""

    low: Expr
    high: Expr
    has_low: bool
    has_high: bool


@dataclass(frozen=True)
class Union:
    """Union of intervals; a single number is an interval with equal ends, and no parts are the empty set."""

    parts: tuple[RealInterval, ...]


@dataclass(frozen=True)
class Relation:
    """Chain of comparisons, such as 2 <= x < 5 or y = 2 x + 1; `signs` has one entry less than `sides`."""

    sides: tuple[Any, ...]
    signs: tuple[str, ...]
    named: bool = False
    """True if the first side is a name and the last side is the value of the name."""


@dataclass(frozen=True)
class Congruence:
    """Residue classes: `left` is congruent to one of `rests` modulo `modulus`; `left` is None if it is left out."""

    left: Expr | None
    rests: tuple[Expr, ...]
    modulus: Expr


@dataclass(frozen=True)
class SolutionFamily:
    """Values of a formula for all integers, such as the solutions of a trigonometric equation.

    Attributes:
      value: Formula or formulas; None if only the membership, such as `k in Z`, was read.
      name: Name of the integer variable.
      domain: Words for the set of the variable, such as `numbersz`.
    """

    value: Any
    name: str
    domain: str


@dataclass(frozen=True)
class Ratio:
    """Numbers separated by colons: a ratio or a time of day.

    Attributes:
      clock: True if the numbers look like a time of day, hours and two digits of minutes.
      suffix: `am` or `pm`; empty without a suffix.
    """

    parts: tuple[Expr, ...]
    clock: bool = False
    suffix: str = ""


@dataclass(frozen=True)
class Table:
    """Rows of a matrix or, if `cases` is True, of a case distinction or a system of equations."""

    rows: tuple[tuple[Any, ...], ...]
    cases: bool = False


@dataclass(frozen=True)
class Words:
    """Text in lower case and without spaces."""

    text: str


def both_signs(value: Any) -> list[Any]:
    """Return a value, or the two values that its plus-minus sign stands for."""
    replaced = [_with_sign(value, sign) for sign in (1, -1)]
    return [value] if replaced[0] == value else replaced


def _with_sign(value: Any, sign: int) -> Any:
    match value:
        case Expr(head="plusminus", args=(inner, which)):
            return _with_sign(inner, sign) if which * sign > 0 else operation("neg", _with_sign(inner, sign))
        case Expr(head=head, args=args):
            return Expr(head, tuple(_with_sign(arg, sign) if isinstance(arg, Expr) else arg for arg in args))
        case Quantity():
            return Quantity(_with_sign(value.expr, sign), value.unit, value.percent, value.base, value.digits)
        case Relation():
            sides = tuple(_with_sign(side, sign) for side in value.sides)
            return Relation(sides, value.signs, value.named)
    return value


def value_of(relation: Relation) -> Any:
    """Return the value of a named value or of a chain of equations; None for other relations."""
    if set(relation.signs) != {"="}:
        return None
    if relation.named or len(relation.sides) > 2:
        return relation.sides[-1]
    constant = all(isinstance(side, Quantity) and not side.expr.symbols() for side in relation.sides)
    return relation.sides[-1] if constant else None


def matched(one: Sequence[Any], other: Sequence[Any], same: Callable[[Any, Any], bool]) -> bool:
    """Return whether the values of two lists can be matched in equal pairs."""
    left = list(other)
    for value in one:
        place = next((index for index, each in enumerate(left) if same(value, each)), None)
        if place is None:
            return False
        del left[place]
    return not left
