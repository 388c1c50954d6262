"""Values of an answer: quantities, lists, sets of numbers, relations, ratios, tables, words."""

from dataclasses import dataclass, field
from typing import Any

from jaxrlhf.rewards.mathematics.expressions import Expr


@dataclass(frozen=True)
class Quantity:
    """A number or formula, with what stands beside it.

    Attributes:
      unit: Unit or word behind the number, empty without one.
      percent: Whether a percent sign is behind the number.
      base: Base of a number system that is written below the digits.
      digits: Digits of a number in such a base.
    """

    expr: Expr
    unit: str = ""
    percent: bool = False
    base: int | None = None
    digits: str = ""


@dataclass(frozen=True)
class Compound:
    """Quantities of several units that are one amount, such as 3 hours 20 minutes."""

    parts: tuple[Quantity, ...]


@dataclass(frozen=True)
class Items:
    """Several values.

    Attributes:
      bracket: Both brackets: `()` and the like of points, whose order counts, `{}` of sets; empty for a plain list.
      joiner: `or` or `and` where one of these words is between the values, else a comma.
    """

    values: tuple[Any, ...]
    bracket: str = ""
    joiner: str = field(default=",", compare=False)


@dataclass(frozen=True)
class RealInterval:
    """Numbers between two ends."""

    low: Expr
    high: Expr
    has_low: bool
    has_high: bool


@dataclass(frozen=True)
class Union:
    """Intervals and single numbers; none is the empty set."""

    parts: tuple[RealInterval, ...]


@dataclass(frozen=True)
class Relation:
    """A chain of comparisons, such as 2 <= x < 5 or y = 2 x + 1; `signs` has one less than `sides`."""

    sides: tuple[Any, ...]
    signs: tuple[str, ...]
    named: bool = False
    """True where the first side is a name, and the last side its value."""


@dataclass(frozen=True)
class Congruence:
    """A residue class."""

    left: Expr
    right: Expr
    modulus: Expr


@dataclass(frozen=True)
class SolutionFamily:
    """Values of a formula for all whole numbers, such as the solutions of a trigonometric equation."""

    value: Any
    name: str
    domain: str


@dataclass(frozen=True)
class Ratio:
    """Numbers between colons.

    Attributes:
      clock: Whether it looks like a time of day, hours and two digits of minutes.
      suffix: `am` or `pm`, empty without one.
    """

    parts: tuple[Expr, ...]
    clock: bool = False
    suffix: str = ""


@dataclass(frozen=True)
class Table:
    """Rows of a matrix, or of a case distinction or system of equations (`cases`)."""

    rows: tuple[tuple[Any, ...], ...]
    cases: bool = False


@dataclass(frozen=True)
class Words:
    """Text, in small letters and without spaces."""

    text: str
