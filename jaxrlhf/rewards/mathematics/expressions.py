"""Expressions of an answer, and their equality: numbers by value, functions of variables at random points.

Two expressions are equal if their values agree at several random points, with positive and negative variables: to 40
digits beyond the decimal point of the largest number on the way, so that 2^2023 and 2^2023 + 1 differ. No computer
algebra is used, so every comparison ends.

Source: Schwartz 1980, Fast probabilistic algorithms for verification of polynomial identities.
"""

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any

import mpmath

DIGITS = 60
"""Working precision in decimal digits."""
_POINTS = 6
_MOST_DIGITS = 10_000
"""Maximum number of decimal digits, before or after the point, of powers and factorials that are computed."""

_GAMMA_DIGITS = 500
"""Maximum precision of the gamma function, which takes a second at 2000 digits."""

Number = Any
"""Number of mpmath."""


class Undefined(ValueError):
    """Error: an expression has no value, by a division by zero, or is too large to compute."""


@dataclass(frozen=True)
class Expr:
    """Expression: a number, a variable, or an operation.

    Attributes:
      head: `number`, `symbol`, or the name of an operation in `OPERATIONS`.
      args: The number, the name, or the operands.
    """

    head: str
    args: tuple[Any, ...]

    def symbols(self) -> frozenset[str]:
        """Return the names of the variables."""
        if self.head == "symbol":
            return frozenset(self.args)
        return frozenset().union(*(arg.symbols() for arg in self.args if isinstance(arg, Expr)))

    def replaced(self, values: Mapping[str, "Expr"]) -> "Expr":
        """Return the expression with other expressions in the place of some variables."""
        if self.head == "symbol":
            return values.get(self.args[0], self)
        return Expr(self.head, tuple(arg.replaced(values) if isinstance(arg, Expr) else arg for arg in self.args))

    def value(self, at: Mapping[str, Number], sizes: list[Number] | None = None) -> Number:
        """Compute the expression.

        Args:
          at: Values of the variables.
          sizes: List to which the value of each operand and of the expression is added.

        Raises:
          Undefined: There is no value, or it is too large.
        """
        try:
            if self.head == "number":
                result = mpmath.mpf(self.args[0].numerator) / self.args[0].denominator
            elif self.head == "symbol":
                result = at[self.args[0]]
            else:
                result = OPERATIONS[self.head](*(arg.value(at, sizes) for arg in self.args))
        except (ArithmeticError, ValueError, TypeError, mpmath.libmp.NoConvergence) as error:
            raise Undefined(str(error)) from error
        if mpmath.isnan(result):
            raise Undefined("not a number")
        if sizes is not None:
            sizes.append(result)
        return result


def number(value: Fraction | int) -> Expr:
    """Return a number as an expression."""
    return Expr("number", (Fraction(value),))


def symbol(name: str) -> Expr:
    """Return a variable as an expression."""
    return Expr("symbol", (name,))


def operation(head: str, *args: Expr) -> Expr:
    """Return an operation of expressions."""
    return Expr(head, args)


def _digits(value: Number) -> Number:
    """Return about how many decimal digits a number has before its point, or zeros after its point."""
    with mpmath.workdps(15):
        return abs(mpmath.log10(abs(value)))


def _power(base: Number, exponent: Number) -> Number:
    if base != 0 and abs(exponent) * _digits(base) > _MOST_DIGITS:
        raise Undefined("the power is too large to compute")
    if base == 0 and mpmath.re(exponent) < 0:
        raise Undefined("a division by zero")
    if mpmath.im(base) == 0 and mpmath.re(base) < 0 and mpmath.im(exponent) == 0:
        odd = _odd_root(exponent)
        if odd is not None:  # the real root, because answers mean the real root
            return odd * mpmath.power(-base, exponent)
    return mpmath.power(base, exponent)


def _odd_root(exponent: Number) -> int | None:
    """Return the sign of a negative number's power if the exponent has an odd denominator, else None."""
    found = Fraction(str(mpmath.nstr(exponent, 30))).limit_denominator(99)
    near = abs(mpmath.mpf(found.numerator) / found.denominator - exponent) < mpmath.mpf(10) ** -25
    if not near or found.denominator == 1 or found.denominator % 2 == 0:
        return None
    return -1 if found.numerator % 2 else 1


def _factorial(value: Number) -> Number:
    """Return the gamma function of value + 1, so that formulas agree at points between whole numbers too."""
    if abs(value) * _digits(abs(value) + 1) > _MOST_DIGITS:
        raise Undefined("the factorial is too large to compute")
    if mpmath.mp.dps > _GAMMA_DIGITS and not mpmath.isint(value):
        raise Undefined("the gamma function takes too long")
    return mpmath.factorial(value)


def _binomial(top: Number, bottom: Number) -> Number:
    if max(abs(top), abs(bottom)) > _MOST_DIGITS:
        raise Undefined("the binomial coefficient is too large to compute")
    return mpmath.binomial(top, bottom)


_TRIGONOMETRIC = ("sin", "cos", "tan", "cot", "sec", "csc", "sinh", "cosh", "tanh")
OPERATIONS: dict[str, Callable[..., Number]] = {
    "add": lambda *terms: mpmath.fsum(terms),
    "mul": lambda *factors: mpmath.fprod(factors),
    "div": lambda top, bottom: top / bottom,
    "neg": lambda value: -value,
    "pow": _power,
    "root": lambda value, degree: _power(value, 1 / degree),
    "factorial": _factorial,
    "binomial": _binomial,
    "abs": abs,
    "degree": lambda value: value * mpmath.pi / 180,
    "floor": mpmath.floor,
    "ceil": mpmath.ceil,
    "log": lambda value, base: mpmath.log(value) / mpmath.log(base),
    "gcd": lambda *values: mpmath.mpf(math.gcd(*(int(value) for value in values))),
    "lcm": lambda *values: mpmath.mpf(math.lcm(*(int(value) for value in values))),
    "max": lambda *values: max(values),
    "min": lambda *values: min(values),
    "pi": lambda: +mpmath.pi,
    "e": lambda: +mpmath.e,
    "i": lambda: mpmath.mpc(0, 1),
    "infinity": lambda: mpmath.inf,
    "exp": mpmath.exp,
    "cis": mpmath.expj,
    "ln": mpmath.log,
    **{name: getattr(mpmath, name) for name in _TRIGONOMETRIC},
    **{f"arc{name}": getattr(mpmath, f"a{name}") for name in _TRIGONOMETRIC},
}
"""Functions of mpmath numbers, by the head of an expression."""

CONSTANTS = ("pi", "e", "i", "infinity")


@lru_cache(maxsize=4096)
def same(one: Expr, other: Expr) -> bool:
    """Return whether two expressions are equal at all sampled points at which either has a value.

    Raises:
      Undefined: The expressions have no variables, and one of them has no value.
    """
    names = sorted(one.symbols() | other.symbols())
    with mpmath.workdps(DIGITS):
        if not names:
            return _close(one, other, {})
        dice, compared = random.Random(0), 0
        for point in range(3 * _POINTS):
            at = {
                name: mpmath.mpf(dice.randint(10**6, 10**8)) / 10**7 * (-1) ** (point + dice.randrange(2))
                for name in names
            }
            undefined = [_value_or_none(each, at) is None for each in (one, other)]
            if all(undefined):
                continue
            if any(undefined) or not _close(one, other, at):
                return False
            compared += 1
            if compared == _POINTS:
                return True
        if compared:
            return True
    return one == other


def alike(one: Expr, other: Expr) -> bool:
    """Return whether two expressions are equal, or have the same form if they have no value."""
    try:
        return same(one, other)
    except Undefined:
        return one == other


def _value_or_none(expr: Expr, at: Mapping[str, Number]) -> Number | None:
    try:
        return expr.value(at)
    except Undefined:
        return None


def _close(one: Expr, other: Expr, at: Mapping[str, Number]) -> bool:
    """Return whether two expressions have the same value at a point, computed with the digits that they need."""
    sizes: list[Number] = []
    values = one.value(at, sizes), other.value(at, sizes)
    if mpmath.isinf(values[0]) or mpmath.isinf(values[1]):
        return bool(values[0] == values[1])
    digits = max((int(_digits(size)) for size in sizes if size and not mpmath.isinf(size)), default=0)
    with mpmath.workdps(DIGITS + 3 * digits):
        left, right = one.value(at), other.value(at)
        return bool(abs(left - right) <= mpmath.mpf(10) ** (-40 - 2 * digits) * max(abs(left), abs(right)))


def real(expr: Expr) -> Any:
    """Return the value of a constant as an mpmath number if it is real or infinite, else None."""
    if expr.symbols():
        return None
    with mpmath.workdps(DIGITS):
        value = _value_or_none(expr, {})
        if value is None or (mpmath.im(value) != 0 and not mpmath.isinf(value)):
            return None
        return mpmath.re(value)
