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


def without(whole: Any, taken: Any) -> Union:
    """Return the difference of two sets of real numbers.

    Raises:
      Unread: A value is not a set of numbers, or an end is not a real number.
    """
    rest = complement(Union(_parts(taken)))
    found = None if rest is None else _intersection(Union(_parts(whole)), rest)
    if found is None:
        raise Unread("an interval whose end is not a real number")
    return found


def complement(union: Union) -> Union | None:
    """Return the real numbers outside of a set; None if an end is not a real number."""
    merged = _merged(union)
    if merged is None:
        return None
    gaps, low, has_low = [], EVERYTHING.low, False
    for part in merged:
        gaps.append(RealInterval(low, part.low, has_low, not part.has_low))
        low, has_low = part.high, not part.has_high
    gaps.append(RealInterval(low, EVERYTHING.high, has_low, False))
    return Union(tuple(gap for gap in gaps if not _is_empty(gap)))


def _is_empty(part: RealInterval) -> bool:
    low, high = real(part.low), real(part.high)
    return bool(low > high or (low == high and (mpmath.isinf(low) or not (part.has_low and part.has_high))))


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
    if isinstance(value, Items) and not value.bracket:
        return _set_of_conditions(value)
    found = interval_of(value)
    if found is not None:
        return Union((found,))
    return _solution(value) if isinstance(value, Relation) else None


def _set_of_conditions(items: Items) -> Union | None:
    """Return the set of conditions for one variable; conditions with a comma hold together, if that is possible."""
    relations = [each for each in items.values if isinstance(each, Relation)]
    sets = [set_of(each) for each in items.values if isinstance(each, Relation | Union)]
    if not relations or len(sets) < len(items.values) or len({variables_of(each) for each in relations}) > 1:
        return None
    if any(each is None for each in sets):
        return None
    anywhere = Union(tuple(part for each in sets if each for part in each.parts))
    if items.joiner == "or":
        return anywhere
    found: Union | None = Union((EVERYTHING,))
    for each in sets:
        found = _intersection(found, each) if found is not None and each is not None else None
    return anywhere if items.joiner == "," and found == Union(()) else found


def variables_of(relation: Relation) -> frozenset[str]:
    """Return the names of the variables of a relation."""
    exprs = [side.expr for side in relation.sides if isinstance(side, Quantity)]
    return frozenset().union(*(expr.symbols() for expr in exprs))


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


def _intersection(one: Union, other: Union) -> Union | None:
    """Return the intersection of two sets; None if an end is not a real number."""
    found = []
    for left, right in ((left, right) for left in one.parts for right in other.parts):
        ends = [real(end) for end in (left.low, right.low, left.high, right.high)]
        if any(end is None for end in ends):
            return None
        low = max(((ends[0], not left.has_low, left), (ends[1], not right.has_low, right)), key=lambda end: end[:2])
        high = min(((ends[2], left.has_high, left), (ends[3], right.has_high, right)), key=lambda end: end[:2])
        found.append(RealInterval(low[2].low, high[2].high, not low[1], bool(high[1])))
    return Union(tuple(part for part in found if not _is_empty(part)))


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
