"""Equality of the values of two answers."""

import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import mpmath

from jaxrlhf.rewards.mathematics.expressions import Expr, Undefined, alike, number, operation, real, symbol
from jaxrlhf.rewards.mathematics.families import is_class, same_classes, same_families
from jaxrlhf.rewards.mathematics.sets import EVERYTHING, complement, same_sets, set_of, turned, variables_of
from jaxrlhf.rewards.mathematics.units import DEGREE, NO_MEASURE, amount_of, measure, with_letters_as_units
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
    matched,
    value_of,
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
    exact = value_of(exact) if isinstance(exact, Relation) else exact
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
        return value if isinstance(value.values[0], Union) else _simplest(value.values[0])
    if isinstance(value, Items) and value.joiner == "or" and all(equal(value.values[0], each) for each in value.values):
        return _simplest(value.values[0])
    if isinstance(value, Items) and value.bracket == "[]" and all(isinstance(each, Items) for each in value.values):
        return Table(tuple(each.values for each in value.values))
    if isinstance(value, Items) and all(isinstance(each, Congruence) for each in value.values):
        first, rests = value.values[0], tuple(rest for each in value.values for rest in each.rests)
        same = all(each.left == first.left and each.modulus == first.modulus for each in value.values)
        return Congruence(first.left, rests, first.modulus) if same and value.joiner != "and" else value
    if isinstance(value, Words) and re.sub("^(there(are|is)|the)", "", value.text) in _NOTHING:
        return Union(())
    if isinstance(value, Union) and value.parts and all(part.low == part.high for part in value.parts):
        return _simplest(Items(tuple(Quantity(part.low) for part in value.parts), "{}"))
    if isinstance(value, Words) and value.text in _EVERYTHING:
        return Union((EVERYTHING,))
    equations = isinstance(value, Table) and all(len(row) == 1 and isinstance(row[0], Relation) for row in value.rows)
    if isinstance(value, Table) and (equations or (value.cases and all(len(row) == 1 for row in value.rows))):
        return Items(tuple(row[0] for row in value.rows), "", "and")
    if isinstance(value, Table) and not value.cases:
        rows = value.rows
        if len(rows) == 1 or all(len(row) == 1 for row in rows):
            return Items(tuple(cell for row in rows for cell in row), "()")
    return value


def _compare(one: Any, other: Any) -> bool | None:
    """Return whether two values are equal; None if their kinds have no comparison in this order."""
    match one, other:
        case Relation(), Items() if one.named and _names(other):
            return equal(_coordinates(one), other)
        case Relation(), _ if not isinstance(other, Relation) and value_of(one) is not None:
            return equal(value_of(one), other)
        case Relation(), Relation():
            return _same_relations(one, other)
        case Quantity(), Quantity():
            return _same_quantities(one, other)
        case (Compound(), Compound() | Quantity()):
            return _same_amounts(one, other)
        case Items(), Quantity() if one.bracket == "()" and other.expr.symbols():
            return _same_components(one, other.expr)
        case Items(), (Compound() | Quantity()):
            amount = _compound_of(one)
            return amount is not None and _same_amounts(amount, other)
        case SolutionFamily(), SolutionFamily():
            return same_families(one, other)
        case SolutionFamily(), Congruence():
            return is_class(one, other)
        case Congruence(), Congruence():
            return same_classes(one, other)
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
        if sets[0] is not None and sets[1] is not None and ({one.bracket, other.bracket} & {"[)", "(]", ""}):
            return same_sets(sets[0], sets[1])
        return _same_items(one, other)
    return None


def _is_letter(expr: Expr) -> bool:
    return expr.head == "symbol" and len(str(expr.args[0])) == 1


def _same_quantities(one: Quantity, other: Quantity) -> bool:
    if one.base is not None or other.base is not None:
        return _same_digits(one, other)
    if one.percent != other.percent:
        share, plain = (one, other) if one.percent else (other, one)
        hundredth = operation("div", share.expr, number(100))
        return not plain.unit and (alike(share.expr, plain.expr) or alike(hundredth, plain.expr))
    measures = measure(one.unit), measure(other.unit)
    if {*measures} == {DEGREE, NO_MEASURE}:
        angle, size = (one, other) if measures[0] == DEGREE else (other, one)
        return alike(operation("degree", angle.expr), size.expr) or (not size.unit and alike(angle.expr, size.expr))
    if one.unit and other.unit:
        rates = all(("money", 1) in kinds for _, kinds in measures) and {one.unit, other.unit} & {"$", "€"}
        return (
            alike(one.expr, other.expr)
            if rates and measures[0][1] != measures[1][1]
            else _same_size((one,), (other,)) is True
        )
    for named, plain in ((one, other), (other, one)):
        lettered = with_letters_as_units(plain.expr) if named.unit and plain.expr.symbols() else None
        if lettered is not None and _same_size((named,), (lettered,)):
            return True
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
    return matched(one.parts, parts, equal) if same is None else same


def _same_size(one: Sequence[Quantity], other: Sequence[Quantity]) -> bool | None:
    """Return whether two amounts are equal in one unit; None if units are unknown or of several kinds."""
    left, right = amount_of(one), amount_of(other)
    if left is None or right is None:
        return None
    return left[0] == right[0] and alike(left[1], right[1])


def _same_relations(one: Relation, other: Relation) -> bool:
    values = value_of(one), value_of(other)
    if one.named and other.named:
        if equal(one.sides[0], other.sides[0]):
            return equal(values[0], values[1])
        if (same := _same_functions(one, other)) is not None:
            return same
    elif values[0] is not None and values[1] is not None:
        return equal(values[0], values[1])
    units = [
        {measure(side.unit) for side in each.sides if isinstance(side, Quantity) and side.unit} for each in (one, other)
    ]
    if units[0] and units[1] and units[0] != units[1]:
        return False
    sets = set_of(one), set_of(other)
    if sets[0] is not None and sets[1] is not None:
        return variables_of(one) == variables_of(other) and same_sets(sets[0], sets[1])
    if len(one.sides) == len(other.sides) == 2:
        for sides, sign in ((other.sides, other.signs[0]), (other.sides[::-1], turned(other.signs[0]))):
            if one.signs[0] == sign and _same_differences(one.sides, sides, scaled="either" if sign in "=!=" else "up"):
                return True
        return False
    turned_round = tuple(turned(sign) for sign in other.signs[::-1])
    return any(
        one.signs == signs and all(map(equal, one.sides, sides))
        for sides, signs in ((other.sides, other.signs), (other.sides[::-1], turned_round))
    )


def _same_functions(one: Relation, other: Relation) -> bool | None:
    """Compare values of one function of different variables, such as f(x) and f(t), or of y and a function.

    The result is None if the names are of other forms.
    """
    left, right = (
        re.fullmatch(r"(\w+(?:\^\{-1\})?)\(([a-z])\)", each.sides[0].text) if isinstance(each.sides[0], Words) else None
        for each in (one, other)
    )
    values = [value_of(each) for each in (one, other)]
    if (left is None and right is None) or not all(isinstance(value, Quantity) for value in values):
        return None
    if left is None or right is None:
        name = (one if left is None else other).sides[0]
        return equal(*values) if isinstance(name, Quantity) and name.expr == symbol("y") else None
    if left[1] != right[1] or left[2] in values[1].expr.symbols():
        return False
    return equal(values[0], replace(values[1], expr=values[1].expr.replaced({right[2]: symbol(left[2])})))


def _coordinates(relation: Relation) -> Any:
    """Return one named value for each coordinate of a named point, such as (x, y) = (1, 2); else the point."""
    name, point = relation.sides[0], value_of(relation)
    names = name.text.strip("()").split(",") if isinstance(name, Words) else []
    if not isinstance(point, Items) or len(names) != len(point.values) or len(names) < 2:
        return point
    pairs = zip(names, point.values, strict=True)
    return Items(tuple(Relation((Quantity(symbol(each)), value), ("=",), named=True) for each, value in pairs))


def _same_components(items: Items, expr: Expr) -> bool:
    """Compare a vector in brackets with a sum of the unit vectors i, j and k in bold letters or with hats."""
    vectors = {name.split()[-1]: name for name in expr.symbols() if name.split()[0] in ("mathbf", "hat", "vec")}
    if not set(vectors) <= set("ijk"[: len(items.values)]) or len(vectors) < len(expr.symbols()):
        return False
    terms = [
        operation("mul", value.expr, symbol(vectors.get(letter, letter)))
        for letter, value in zip("ijk", items.values, strict=False)
        if isinstance(value, Quantity) and not value.unit
    ]
    return len(terms) == len(items.values) and alike(operation("add", *terms), expr)


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
    further = {name: symbol(name + "'") for name in first.symbols()}
    crossed = operation("mul", first, second.replaced(further)), operation("mul", second, first.replaced(further))
    at = {name: mpmath.mpf(7 + 3 * place) / 5 for place, name in enumerate(sorted(first.symbols()))}
    try:
        factor = mpmath.re(first.value(at) / second.value(at))
    except (Undefined, ZeroDivisionError):
        return False
    return factor != 0 and alike(*crossed) and (scaled == "either" or bool(factor > 0))


def _same_items(one: Items, other: Items) -> bool:
    """Compare lists: the order counts in round and square brackets, but not in sets and plain lists."""
    if len(one.values) != len(other.values) or len(one.values) > _MOST_VALUES:
        amounts = [_compound_of(each) for each in (one, other)]
        return bool(amounts[0] and amounts[1] and _same_amounts(amounts[0], amounts[1]))
    ordered = [each.bracket not in ("", "{}") for each in (one, other)]
    names = [_names(each) for each in (one, other)]
    if len(names[0] | names[1]) > 1 and (one.joiner == "or") != (other.joiner == "or"):
        return False
    named_apart = len(names[0] | names[1]) > 1 and not (names[0] and names[1])
    if named_apart and all(each.bracket in ("", "{}", "()") for each in (one, other)):
        return all(map(equal, one.values, other.values))
    if ordered[0] != ordered[1]:
        return False
    if all(ordered):
        round_ = all(each.bracket in ("()", "[]") for each in (one, other))
        return (one.bracket == other.bracket or (round_ and len(one.values) != 2)) and all(
            map(equal, one.values, other.values)
        )
    return matched(one.values, other.values, equal)


def _names(items: Items) -> frozenset[str]:
    """Return the names of named values without their subscripts; empty if a value has no name."""
    named = [str(value.sides[0]) for value in items.values if isinstance(value, Relation) and value.named]
    return frozenset(name.split("_")[0] for name in named) if len(named) == len(items.values) else frozenset()


def _compound_of(items: Items) -> Compound | None:
    quantities = items.values
    if items.bracket or not all(isinstance(each, Quantity) and each.unit for each in quantities):
        return None
    return Compound(tuple(quantities))


def _same_ratios(one: Ratio, other: Ratio) -> bool:
    """Compare times of day number by number, of 12 or 24 hours, and other ratios by their proportions."""
    if len(one.parts) != len(other.parts) or (one.suffix and other.suffix and one.suffix != other.suffix):
        return False
    if (one.clock and other.clock) or one.suffix or other.suffix:
        return (
            one.clock == other.clock
            and bool(_hours(one) & _hours(other))
            and all(map(alike, one.parts[1:], other.parts[1:]))
        )
    crossed = [
        (operation("mul", left, after), operation("mul", right, before))
        for (left, before), (right, after) in pairwise(zip(one.parts, other.parts, strict=True))
    ]
    return all(alike(left, right) for left, right in crossed)


def _hours(time: Ratio) -> set[Any]:
    """Return the hour of a time of day as it is written and, with `am` or `pm`, as one of 24 hours."""
    hour = real(time.parts[0])
    return {hour} if hour is None or not time.suffix else {hour, hour % 12 + 12 * (time.suffix == "pm")}


def _cases(table: Table) -> list[Items]:
    """Return the rows of a case distinction, with the condition in the place of a final `otherwise`."""
    rows, otherwise = list(table.rows), Words("otherwise")
    sets = [set_of(row[-1]) for row in rows[:-1]]
    if len(rows) > 1 and rows[-1][-1] == otherwise and all(each is not None for each in sets):
        rest = complement(Union(tuple(part for each in sets if each for part in each.parts)))
        rows[-1] = (*rows[-1][:-1], otherwise if rest is None else rest)
    return [Items(row, "()") for row in rows]


def _same_tables(one: Table, other: Table) -> bool:
    if len(one.rows) != len(other.rows) or one.cases != other.cases:
        return False
    if one.cases:
        return matched(_cases(one), _cases(other), equal)
    return all(
        len(left) == len(right) and all(map(equal, left, right))
        for left, right in zip(one.rows, other.rows, strict=True)
    )
