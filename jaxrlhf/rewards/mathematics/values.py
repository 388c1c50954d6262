"""Values of an answer: quantities, lists, sets of numbers, relations, ratios, tables, words."""

from dataclasses import dataclass, field
from typing import Any

from jaxrlhf.rewards.mathematics.expressions import Expr


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
    """Residue class: `left` is congruent to `right` modulo `modulus`."""

    left: Expr
    right: Expr
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
