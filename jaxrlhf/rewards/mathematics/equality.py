"""Equality of the values of two answers."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import mpmath

from jaxrlhf.rewards.mathematics.expressions import DIGITS, Expr, Undefined, alike, number, operation, real
from jaxrlhf.rewards.mathematics.sets import EVERYTHING, same_sets, set_of, turned
from jaxrlhf.rewards.mathematics.units import amount_of, unit_of
from jaxrlhf.rewards.mathematics.values import (
    Compound,
    Congruence,
    Items,
    Quantity,
    Ratio,
    Relation,
    SolutionFamily,
    Table,
    Union,
    Words,
)

_MOST_VALUES = 60
_NOTHING = ("nosolution", "nosolutions", "norealsolution", "norealsolutions", "emptyset", "none", "nosuchvalues")
_EVERYTHING = ("allrealnumbers", "allreals", "anyrealnumber", "realnumbers")


def equal(one: Any, other: Any) -> bool:
    """Return whether the values of two answers are equal."""
    one, other = _simplest(one), _simplest(other)
    for left, right in ((one, other), (other, one)):
        verdict = _compare(left, right)
        if verdict is not None:
            return verdict
    return False


def rounds(exact: Any, rounded: Any) -> bool:
    """Return whether the second value is the first one, rounded or cut off; a name before the first is ignored."""
    exact = _value_of(exact) if isinstance(exact, Relation) else exact
    if not isinstance(exact, Quantity) or not isinstance(rounded, Quantity) or rounded.expr.head != "number":
        return False
    (decimal,), value = rounded.expr.args, real(exact.expr)
    places = next((n for n in range(16) if (decimal * 10**n).denominator == 1), None)
    if value is None or places is None:
        return False
    return bool(
        abs(value - mpmath.mpf(decimal.numerator) / decimal.denominator)
        <= mpmath.mpf(10) ** -places / (1 if places else 2)
    )


def _simplest(value: Any) -> Any:
    """Return the simplest equivalent value: a list of one value, words for a set, and tables may change their kind."""
    if isinstance(value, Items) and len(value.values) == 1 and value.bracket in ("", "{}"):
        return _simplest(value.values[0])
    if isinstance(value, Items) and value.joiner == "or" and all(equal(value.values[0], each) for each in value.values):
        return _simplest(value.values[0])
    if isinstance(value, Words) and value.text in _NOTHING:
        return Union(())
    if isinstance(value, Words) and value.text in _EVERYTHING:
        return Union((EVERYTHING,))
    if isinstance(value, Table) and value.cases and all(len(row) == 1 for row in value.rows):
        return Items(tuple(row[0] for row in value.rows), "", "and")
    if isinstance(value, Table) and not value.cases:
        rows = value.rows
        if len(rows) == 1 or all(len(row) == 1 for row in rows):
            return Items(tuple(cell for row in rows for cell in row), "()")
    return value


def _compare(one: Any, other: Any) -> bool | None:
    """Return whether two values are equal; None if their kinds have no comparison in this order."""
    match one, other:
        case Relation(), _ if not isinstance(other, Relation) and _value_of(one) is not None:
            return equal(_value_of(one), other)
        case Relation(), Relation():
            return _same_relations(one, other)
        case Quantity(), Quantity():
            return _same_quantities(one, other)
        case (Compound(), Compound() | Quantity()):
            return _same_amounts(one, other)
        case Items(), (Compound() | Quantity()):
            amount = _compound_of(one)
            return amount is not None and _same_amounts(amount, other)
        case SolutionFamily(), SolutionFamily():
            return _same_families(one, other)
        case Congruence(), Congruence():
            return _same_classes(one, other)
        case Ratio(), Ratio():
            return _same_ratios(one, other)
        case Ratio(), Quantity():
            two = len(one.parts) == 2 and not one.clock and not other.unit and not other.percent
            return two and alike(operation("div", *one.parts), other.expr)
        case Table(), Table():
            return _same_tables(one, other)
        case Words(), Words():
            return one.text == other.text
        case Words(), Quantity():
            return _is_letter(other.expr) and not other.unit and str(other.expr.args[0]).lower() == one.text
    sets = [set_of(value) for value in (one, other)]
    if sets[0] is not None and sets[1] is not None and not (isinstance(one, Items) and isinstance(other, Items)):
        return same_sets(sets[0], sets[1])
    if isinstance(one, Items) and isinstance(other, Items):
        if sets[0] is not None and sets[1] is not None and {one.bracket, other.bracket} & {"[)", "(]"}:
            return same_sets(sets[0], sets[1])
        return _same_items(one, other)
    return None


def _value_of(relation: Relation) -> Any:
    """Return the value of a named value or of a chain of equations; None for other relations."""
    if set(relation.signs) != {"="}:
        return None
    if relation.named or len(relation.sides) > 2:
        return relation.sides[-1]
    constant = all(isinstance(side, Quantity) and not side.expr.symbols() for side in relation.sides)
    return relation.sides[-1] if constant else None


def _is_letter(expr: Expr) -> bool:
    return expr.head == "symbol" and len(str(expr.args[0])) == 1


def _same_quantities(one: Quantity, other: Quantity) -> bool:
    if one.base is not None or other.base is not None:
        return _same_digits(one, other)
    if one.percent != other.percent:
        share, plain = (one, other) if one.percent else (other, one)
        hundredth = operation("div", share.expr, number(100))
        return not plain.unit and (alike(share.expr, plain.expr) or alike(hundredth, plain.expr))
    units = unit_of(one.unit), unit_of(other.unit)
    if one.unit and other.unit and units[0] != units[1]:
        return _same_size((one,), (other,)) is True
    if {*units} == {"degree", ""}:
        angle, size = (one.expr, other.expr) if units[0] else (other.expr, one.expr)
        return alike(angle, size) or alike(operation("degree", angle), size)
    if _is_letter(one.expr) and _is_letter(other.expr):
        return str(one.expr.args[0]).lower() == str(other.expr.args[0]).lower()
    return alike(one.expr, other.expr)


def _same_digits(one: Quantity, other: Quantity) -> bool:
    """Compare numbers if at least one has its base as a subscript; the other number may leave the base out."""
    if one.base is not None and other.base is not None:
        return one.base == other.base and one.digits.lstrip("0") == other.digits.lstrip("0")
    return not one.unit and not other.unit and alike(one.expr, other.expr)


def _same_amounts(one: Compound, other: Compound | Quantity) -> bool:
    """Compare amounts in several units: as totals in one unit if all units are of one kind, else part by part."""
    parts = other.parts if isinstance(other, Compound) else (other,)
    same = _same_size(one.parts, parts)
    return _matched(one.parts, parts) if same is None else same


def _same_size(one: Sequence[Quantity], other: Sequence[Quantity]) -> bool | None:
    """Return whether two amounts are equal in one unit; None if units are unknown or of several kinds."""
    left, right = amount_of(one), amount_of(other)
    if left is None or right is None:
        return None
    return left[0] == right[0] and alike(left[1], right[1])


def _same_relations(one: Relation, other: Relation) -> bool:
    values = _value_of(one), _value_of(other)
    if one.named and other.named:
        if equal(one.sides[0], other.sides[0]):
            return equal(values[0], values[1])
    elif values[0] is not None and values[1] is not None:
        return equal(values[0], values[1])
    units = [
        {unit_of(side.unit) for side in each.sides if isinstance(side, Quantity) and side.unit} for each in (one, other)
    ]
    if units[0] and units[1] and units[0] != units[1]:
        return False
    sets = set_of(one), set_of(other)
    if sets[0] is not None and sets[1] is not None:
        return _variable_of(one) == _variable_of(other) and same_sets(sets[0], sets[1])
    if len(one.sides) == len(other.sides) == 2:
        for sides, sign in ((other.sides, other.signs[0]), (other.sides[::-1], turned(other.signs[0]))):
            if one.signs[0] == sign and _same_differences(one.sides, sides, scaled="either" if sign in "=!=" else "up"):
                return True
        return False
    return one.signs == other.signs and all(map(equal, one.sides, other.sides))


def _same_differences(one: Sequence[Any], other: Sequence[Any], *, scaled: str) -> bool:
    """Return whether left minus right is equal in two relations, up to a constant factor.

    Args:
      scaled: `either` allows a factor of any sign, `up` only a positive factor.
    """
    if not all(isinstance(side, Quantity) for side in (*one, *other)):
        return False
    first, second = (operation("add", left.expr, operation("neg", right.expr)) for left, right in (one, other))
    if first.symbols() != second.symbols() or not first.symbols():
        return False
    # One is a multiple of the other if first(x) second(y) = second(x) first(y) at any two points x and y.
    crossed = operation("mul", first, second.renamed("'")), operation("mul", second, first.renamed("'"))
    at = {name: mpmath.mpf(7 + 3 * place) / 5 for place, name in enumerate(sorted(first.symbols()))}
    try:
        factor = mpmath.re(first.value(at) / second.value(at))
    except (Undefined, ZeroDivisionError):
        return False
    return factor != 0 and alike(*crossed) and (scaled == "either" or bool(factor > 0))


def _variable_of(relation: Relation) -> frozenset[str]:
    exprs = [side.expr for side in relation.sides if isinstance(side, Quantity)]
    return frozenset().union(*(expr.symbols() for expr in exprs))


def _same_items(one: Items, other: Items) -> bool:
    """Compare lists: the order counts in round and square brackets, but not in sets and plain lists."""
    if len(one.values) != len(other.values) or len(one.values) > _MOST_VALUES:
        amounts = [_compound_of(each) for each in (one, other)]
        return bool(amounts[0] and amounts[1] and _same_amounts(amounts[0], amounts[1]))
    ordered = [each.bracket not in ("", "{}") for each in (one, other)]
    names = [_names(each) for each in (one, other)]
    if not any(ordered) and len(names[0] | names[1]) > 1 and not (names[0] and names[1]):
        return all(map(equal, one.values, other.values))
    if ordered[0] != ordered[1]:
        return False
    if all(ordered):
        round_ = all(each.bracket in ("()", "[]") for each in (one, other))
        return (one.bracket == other.bracket or (round_ and len(one.values) != 2)) and all(
            map(equal, one.values, other.values)
        )
    return _matched(one.values, other.values)


def _names(items: Items) -> frozenset[str]:
    """Return the names of named values without their subscripts; empty if a value has no name."""
    named = [str(value.sides[0]) for value in items.values if isinstance(value, Relation) and value.named]
    return frozenset(name.split("_")[0] for name in named) if len(named) == len(items.values) else frozenset()


def _compound_of(items: Items) -> Compound | None:
    quantities = items.values
    if items.bracket or not all(isinstance(each, Quantity) and each.unit for each in quantities):
        return None
    return Compound(tuple(quantities))


def _matched(one: Sequence[Any], other: Sequence[Any], same: Callable[[Any, Any], bool] = equal) -> bool:
    """Return whether the values of two lists can be matched in equal pairs."""
    left = list(other)
    for value in one:
        place = next((index for index, each in enumerate(left) if same(value, each)), None)
        if place is None:
            return False
        del left[place]
    return not left


def _same_families(one: SolutionFamily, other: SolutionFamily) -> bool:
    """Compare formulas over all integers: their values count, and the name of the variable does not."""
    if one.domain != other.domain:
        return False
    lists = [family.value.values if isinstance(family.value, Items) else (family.value,) for family in (one, other)]
    lines = [
        [_line(value, family.name) for value in values] for family, values in zip((one, other), lists, strict=True)
    ]
    if any(line is None for each in lines for line in each) or len(lines[0]) != len(lines[1]):
        return False
    return _matched(lines[0], lines[1], lambda left, right: _same_lines(left, right, one.domain))


def _line(value: Any, name: str) -> tuple[Any, Any] | None:
    """Return start and step of a formula that is linear in the variable `name`; None for other formulas."""
    if isinstance(value, Relation):
        value = _value_of(value)
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


def _same_classes(one: Congruence, other: Congruence) -> bool:
    if not (alike(one.left, other.left) and alike(one.modulus, other.modulus)):
        return False
    ends = [real(each) for each in (one.right, other.right, one.modulus)]
    if any(end is None for end in ends) or ends[2] == 0:
        return alike(one.right, other.right)
    return bool(mpmath.isint((ends[0] - ends[1]) / ends[2]))


def _same_ratios(one: Ratio, other: Ratio) -> bool:
    """Compare times of day number by number, and other ratios by their proportions."""
    if len(one.parts) != len(other.parts) or (one.suffix and other.suffix and one.suffix != other.suffix):
        return False
    if (one.clock and other.clock) or one.suffix or other.suffix:
        return all(map(alike, one.parts, other.parts))
    crossed = [
        (operation("mul", left, after), operation("mul", right, before))
        for (left, before), (right, after) in pairwise(zip(one.parts, other.parts, strict=True))
    ]
    return all(alike(left, right) for left, right in crossed)


def _same_tables(one: Table, other: Table) -> bool:
    if len(one.rows) != len(other.rows) or one.cases != other.cases:
        return False
    if one.cases:
        return _matched([Items(row, "()") for row in one.rows], [Items(row, "()") for row in other.rows])
    return all(
        len(left) == len(right) and all(map(equal, left, right))
        for left, right in zip(one.rows, other.rows, strict=True)
    )
