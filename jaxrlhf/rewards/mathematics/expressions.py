"""Expressions of an answer, and their equality: numbers by value, functions of variables at random points.

Two expressions are equal if their values agree to 40 digits at several random points, with positive and negative
variables. No computer algebra is used, so every comparison ends.

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
_SAME = mpmath.mpf(10) ** -40
"""Largest difference of equal values, relative to the larger value."""
_POINTS = 6
_LARGEST_EXPONENT = 10**6
"""Largest exponent, and largest argument of a factorial, that is computed."""

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

    def value(self, at: Mapping[str, Number]) -> Number:
        """Compute the expression.

        Args:
          at: Values of the variables.

        Raises:
          Undefined: There is no value, or it is too large.
        """
        if self.head == "number":
            return mpmath.mpf(self.args[0].numerator) / self.args[0].denominator
        if self.head == "symbol":
            return at[self.args[0]]
        try:
            result = OPERATIONS[self.head](*(arg.value(at) for arg in self.args))
        except (ArithmeticError, ValueError, TypeError, mpmath.libmp.NoConvergence) as error:
            raise Undefined(str(error)) from error
        if mpmath.isnan(result):
            raise Undefined("not a number")
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


def _power(base: Number, exponent: Number) -> Number:
    size = abs(exponent)
    if size > _LARGEST_EXPONENT or (base != 0 and size * abs(mpmath.log10(abs(base))) > _LARGEST_EXPONENT):
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


def _root(value: Number, degree: Number) -> Number:
    return _power(value, 1 / degree)


def _factorial(value: Number) -> Number:
    if mpmath.im(value) != 0 or value < 0 or value != mpmath.floor(value) or value > _LARGEST_EXPONENT:
        raise Undefined("a factorial of no whole number")
    return mpmath.factorial(value)


def _binomial(top: Number, bottom: Number) -> Number:
    if max(abs(top), abs(bottom)) > _LARGEST_EXPONENT:
        raise Undefined("the binomial coefficient is too large to compute")
    return mpmath.binomial(top, bottom)


def _infinity() -> Number:
    return mpmath.inf


OPERATIONS: dict[str, Callable[..., Number]] = {
    "add": lambda *terms: mpmath.fsum(terms),
    "mul": lambda *factors: mpmath.fprod(factors),
    "div": lambda top, bottom: top / bottom,
    "neg": lambda value: -value,
    "pow": _power,
    "root": _root,
    "factorial": _factorial,
    "binomial": _binomial,
    "abs": abs,
    "degree": lambda value: value * mpmath.pi / 180,
    "floor": lambda value: mpmath.floor(value),
    "ceil": lambda value: mpmath.ceil(value),
    "log": lambda value, base: mpmath.log(value) / mpmath.log(base),
    "gcd": lambda *values: mpmath.mpf(math.gcd(*(int(value) for value in values))),
    "lcm": lambda *values: mpmath.mpf(math.lcm(*(int(value) for value in values))),
    "max": lambda *values: max(values),
    "min": lambda *values: min(values),
    "pi": lambda: +mpmath.pi,
    "e": lambda: +mpmath.e,
    "i": lambda: mpmath.mpc(0, 1),
    "infinity": _infinity,
    **{
        name: getattr(mpmath, mp)
        for name, mp in {
            **{each: each for each in ("sin", "cos", "tan", "cot", "sec", "csc", "sinh", "cosh", "tanh", "exp")},
            **{f"arc{each}": f"a{each}" for each in ("sin", "cos", "tan", "cot", "sec", "csc", "sinh", "cosh", "tanh")},
            "ln": "log",
        }.items()
    },
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
            return _close(one.value({}), other.value({}))
        dice, compared = random.Random(0), 0
        for point in range(3 * _POINTS):
            at = {
                name: mpmath.mpf(dice.randint(10**6, 10**8)) / 10**7 * (-1) ** (point + dice.randrange(2))
                for name in names
            }
            values = [_value_or_none(each, at) for each in (one, other)]
            if values[0] is None and values[1] is None:
                continue
            if values[0] is None or values[1] is None or not _close(*values):
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


def _close(one: Number, other: Number) -> bool:
    if mpmath.isinf(one) or mpmath.isinf(other):
        return bool(one == other)
    return bool(abs(one - other) <= _SAME * max(abs(one), abs(other)))


def real(expr: Expr) -> Any:
    """Return the value of a constant as an mpmath number if it is real or infinite, else None."""
    if expr.symbols():
        return None
    with mpmath.workdps(DIGITS):
        value = _value_or_none(expr, {})
        if value is None or (mpmath.im(value) != 0 and not mpmath.isinf(value)):
            return None
        return mpmath.re(value)
