"""Sets of real numbers: intervals, unions, and solutions of inequalities in one variable."""

from typing import Any

import mpmath

from jaxrlhf.rewards.mathematics.expressions import Expr, alike, operation, real
from jaxrlhf.rewards.mathematics.tokens import Unread
from jaxrlhf.rewards.mathematics.values import Items, Quantity, RealInterval, Relation, Union

INFINITY = operation("infinity")
EVERYTHING = RealInterval(operation("neg", INFINITY), INFINITY, False, False)
"""All real numbers."""


def interval_of(value: Any) -> RealInterval | None:
    """Return a pair in brackets as an interval; None for other values."""
    if not isinstance(value, Items) or len(value.values) != 2 or value.bracket not in ("()", "(]", "[)", "[]"):
        return None
    low, high = value.values
    if not all(isinstance(end, Quantity) and not end.percent for end in (low, high)):
        return None
    return RealInterval(low.expr, high.expr, value.bracket[0] == "[", value.bracket[1] == "]")


def _parts(value: Any) -> tuple[RealInterval, ...]:
    if isinstance(value, Union):
        return value.parts
    if isinstance(value, Items) and value.bracket == "{}":
        return tuple(RealInterval(unitless(each), unitless(each), True, True) for each in value.values)
    found = interval_of(value)
    if found is None:
        raise Unread("a union of values that are not sets of numbers")
    return (found,)


def joined(one: Any, other: Any) -> Union:
    return Union(_parts(one) + _parts(other))


def without(whole: Any, points: Any) -> Union:
    """Return a set of real numbers except single points.

    Raises:
      Unread: `whole` is not a set of numbers, or `points` are not real numbers in braces.
    """
    if not isinstance(points, Items) or points.bracket != "{}":
        raise Unread("a difference of sets")
    parts = [*_parts(whole)]
    for point in map(unitless, points.values):
        rest: list[RealInterval] = []
        for part in parts:
            at, low, high = (real(end) for end in (point, part.low, part.high))
            if at is None or low is None or high is None:
                raise Unread("an interval whose end is not a real number")
            if low <= at <= high:
                left = RealInterval(part.low, point, part.has_low, False)
                right = RealInterval(point, part.high, False, part.has_high)
                rest += [left] * bool(low < at) + [right] * bool(at < high)
            else:
                rest.append(part)
        parts = rest
    return Union(tuple(parts))


def unitless(value: Any) -> Expr:
    """Return the expression of a quantity without unit and percent sign.

    Raises:
      Unread: The value is another one.
    """
    if isinstance(value, Quantity) and not value.unit and not value.percent:
        return value.expr
    raise Unread("expected a number or formula without unit")


def turned(sign: str) -> str:
    """Return the sign of a comparison after its sides are exchanged."""
    return {"<": ">", ">": "<", "<=": ">=", ">=": "<="}.get(sign, sign)


def set_of(value: Any) -> Union | None:
    """Return the set of a value that is an interval, a union or inequalities in one variable; else None."""
    if isinstance(value, Union):
        return value
    if isinstance(value, Items) and value.joiner in ("or", "and") and not value.bracket:
        parts = [set_of(each) for each in value.values]
        if not all(isinstance(each, Relation) for each in value.values) or any(part is None for part in parts):
            return None
        if value.joiner == "or":
            return Union(tuple(interval for part in parts if part for interval in part.parts))
        return _intersection([part for part in parts if part is not None])
    found = interval_of(value)
    if found is not None:
        return Union((found,))
    return _solution(value) if isinstance(value, Relation) else None


def _solution(relation: Relation) -> Union | None:
    """Return the set that a chain such as 2 <= x < 5, or x != 3, describes; None for other relations."""
    if relation.signs == ("!=",) and all(isinstance(side, Quantity) for side in relation.sides):
        left, right = (side.expr for side in relation.sides)
        if left.head == "symbol" and not right.symbols():
            low, high = EVERYTHING.low, EVERYTHING.high
            return Union((RealInterval(low, right, False, False), RealInterval(right, high, False, False)))
    if relation.named or not set(relation.signs) <= {"<", "<=", ">", ">="} or len(relation.sides) > 3:
        return None
    sides, signs = relation.sides, relation.signs
    if not all(isinstance(side, Quantity) for side in sides):
        return None
    if signs[0][0] == ">":
        sides, signs = sides[::-1], tuple(turned(sign) for sign in signs[::-1])
    if any(sign[0] == ">" for sign in signs):
        return None
    place = next((index for index, side in enumerate(sides) if _is_variable(side.expr)), None)
    others = [side for index, side in enumerate(sides) if index != place]
    if place is None or any(side.expr.symbols() for side in others) or (len(sides) == 3 and place != 1):
        return None
    if sides[place].expr.head == "abs":
        return _at_distance(sides[1 - place].expr, signs[0] == "<=", below=place == 0) if len(sides) == 2 else None
    low = sides[place - 1].expr if place else EVERYTHING.low
    high = sides[place + 1].expr if place + 1 < len(sides) else EVERYTHING.high
    has_low, has_high = place > 0 and signs[place - 1] == "<=", place + 1 < len(sides) and signs[place] == "<="
    return Union((RealInterval(low, high, has_low, has_high),))


def _is_variable(expr: Expr) -> bool:
    """Return True for a variable, or the absolute value of one."""
    return expr.head == "symbol" or (expr.head == "abs" and expr.args[0].head == "symbol")


def _at_distance(far: Expr, ends: bool, *, below: bool) -> Union:
    """Return the numbers whose absolute value is below, or else above, a number; `ends` adds that distance itself."""
    near = operation("neg", far)
    if below:
        return Union((RealInterval(near, far, ends, ends),))
    return Union((RealInterval(EVERYTHING.low, near, False, ends), RealInterval(far, EVERYTHING.high, ends, False)))


def _intersection(sets: list[Union]) -> Union | None:
    """Return the intersection of sets that are one interval each; None for other sets."""
    if any(len(each.parts) != 1 for each in sets):
        return None
    found = sets[0].parts[0]
    for each in sets[1:]:
        (part,) = each.parts
        ends = [real(end) for end in (found.low, part.low, found.high, part.high)]
        if any(end is None for end in ends):
            return None
        low = max(((ends[0], not found.has_low, found), (ends[1], not part.has_low, part)), key=lambda end: end[:2])
        high = min(((ends[2], found.has_high, found), (ends[3], part.has_high, part)), key=lambda end: end[:2])
        found = RealInterval(low[2].low, high[2].high, not low[1], bool(high[1]))
    return Union((found,))


def same_sets(one: Union, other: Union) -> bool:
    """Compare unions of intervals after merging intervals that meet."""
    merged = [_merged(each) for each in (one, other)]
    if merged[0] is None or merged[1] is None:
        return one == other
    if len(merged[0]) != len(merged[1]):
        return False
    return all(
        left.has_low == right.has_low
        and left.has_high == right.has_high
        and alike(left.low, right.low)
        and alike(left.high, right.high)
        for left, right in zip(*merged, strict=True)
    )


def _merged(union: Union) -> list[RealInterval] | None:
    """Return sorted intervals, merged where they meet; None if an interval is empty or an end is not a real number."""
    ends = [(real(part.low), real(part.high), part) for part in union.parts]
    if any(low is None or high is None for low, high, _ in ends):
        return None
    found: list[RealInterval] = []
    for low, high, part in sorted(ends, key=lambda end: (end[0], not end[2].has_low)):
        part = RealInterval(
            part.low, part.high, part.has_low and not mpmath.isinf(low), part.has_high and not mpmath.isinf(high)
        )
        if low > high or (low == high and not (part.has_low and part.has_high)):
            return None
        if found:
            last = found[-1]
            end = real(last.high)
            if low < end or (low == end and (last.has_high or part.has_low)):
                keep = last if end > high or (end == high and last.has_high) else part
                found[-1] = RealInterval(last.low, keep.high, last.has_low, keep.has_high)
                continue
        found.append(part)
    return found
