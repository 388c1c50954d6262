"""Equality of values over all integers: families of solutions, and residue classes."""

from typing import Any

import mpmath

from jaxrlhf.rewards.mathematics.expressions import DIGITS, Expr, Undefined, alike, real
from jaxrlhf.rewards.mathematics.values import (
    Congruence,
    Items,
    Quantity,
    Relation,
    SolutionFamily,
    matched,
    value_of,
)


def same_families(one: SolutionFamily, other: SolutionFamily) -> bool:
    """Compare formulas over all integers: their values count, and the name of the variable does not."""
    if one.domain != other.domain:
        return False
    lists = [family.value.values if isinstance(family.value, Items) else (family.value,) for family in (one, other)]
    lines = [
        [_line(value, family.name) for value in values] for family, values in zip((one, other), lists, strict=True)
    ]
    if any(line is None for each in lines for line in each) or len(lines[0]) != len(lines[1]):
        return False
    return matched(lines[0], lines[1], lambda left, right: _same_lines(left, right, one.domain))


def _line(value: Any, name: str) -> tuple[Any, Any] | None:
    """Return start and step of a formula that is linear in the variable `name`; None for other formulas."""
    if isinstance(value, Relation):
        value = value_of(value)
    if not isinstance(value, Quantity) or value.percent or value.expr.symbols() - {name}:
        return None
    with mpmath.workdps(DIGITS):
        try:
            start, second, third = (value.expr.value({name: mpmath.mpf(at)}) for at in range(3))
        except Undefined:
            return None
        step = second - start
        if abs(third - second - step) > mpmath.mpf(10) ** -40 or step == 0 or mpmath.im(start) or mpmath.im(step):
            return None
        return start, step


def _same_lines(one: tuple[Any, Any], other: tuple[Any, Any], domain: str) -> bool:
    with mpmath.workdps(DIGITS):
        near = mpmath.mpf(10) ** -40
        if domain != "numbersz":
            return bool(abs(one[0] - other[0]) < near and abs(one[1] - other[1]) < near)
        shift = (one[0] - other[0]) / one[1]
        return bool(abs(abs(one[1]) - abs(other[1])) < near and abs(shift - mpmath.nint(shift)) < near)


def same_classes(one: Congruence, other: Congruence) -> bool:
    """Compare residue classes."""
    if one.left is not None and other.left is not None and not alike(one.left, other.left):
        return False
    return alike(one.modulus, other.modulus) and matched(
        one.rests, other.rests, lambda left, right: _same_rest(left, right, one.modulus)
    )


def _same_rest(one: Expr, other: Expr, modulus: Expr) -> bool:
    ends = [real(each) for each in (one, other, modulus)]
    if any(end is None for end in ends) or ends[2] == 0:
        return alike(one, other)
    return bool(mpmath.isint((ends[0] - ends[1]) / ends[2]))


def is_class(family: SolutionFamily, other: Congruence) -> bool:
    """Return whether a formula over all integers, such as x = 7 k + 3, describes a residue class."""
    line = _line(family.value, family.name) if family.domain == "numbersz" else None
    modulus, rest = real(other.modulus), real(other.rests[0])
    if line is None or modulus is None or rest is None or len(other.rests) > 1 or modulus == 0:
        return False
    return bool(abs(line[1]) == abs(modulus) and mpmath.isint((line[0] - rest) / modulus))
