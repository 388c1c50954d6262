"""Units of quantities: synonyms, prefixes, powers and quotients, and conversion of amounts to common units."""

from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

from jaxrlhf.rewards.mathematics.expressions import Expr, number, operation, real
from jaxrlhf.rewards.mathematics.values import Quantity


class Unit(NamedTuple):
    """Unit: factor times a power of the base unit of a kind; a liter is a thousandth of a length's third power."""

    factor: Fraction
    kind: str
    power: int = 1


_FACTORS = {
    "time": {"second": "1", "minute": "60", "hour": "3600", "day": "86400", "week": "604800"},
    "length": {"meter": "1", "inch": "0.0254", "foot": "0.3048", "yard": "0.9144", "mile": "1609.344"},
    "money": {"dollar": "1", "euro": "1", "cent": "0.01"},
    "weight": {"gram": "1", "ounce": "28.349523125", "pound": "453.59237"},
}
_METRIC = {
    "m": "meter", "s": "second", "g": "gram", "L": "liter", "l": "liter", "Hz": "hertz", "N": "newton", "J": "joule",
    "W": "watt", "Pa": "pascal", "V": "volt", "A": "ampere", "F": "farad", "T": "tesla", "mol": "mole",
}  # fmt: skip
_PREFIXES = (
    ("k", "kilo", "1e3"), ("M", "mega", "1e6"), ("G", "giga", "1e9"), ("d", "deci", "1e-1"), ("c", "centi", "1e-2"),
    ("m", "milli", "1e-3"), ("micro", "micro", "1e-6"), ("n", "nano", "1e-9"),
)  # fmt: skip
_SYNONYMS = {
    "second": "sec secs", "minute": "min mins", "hour": "h hr hrs", "inch": "in inches", "foot": "ft feet",
    "yard": "yd", "mile": "mi", "ounce": "oz", "pound": "lb lbs £", "dollar": "$ usd bucks", "euro": "€",
    "degree": "deg degrees", "radian": "rad rads", "hertz": "hertz", "celsius": "celsius",
    "person": "people", "child": "children", "man": "men", "woman": "women",
}  # fmt: skip
_POWERS = {"square": 2, "sq": 2, "squared": 2, "cubic": 3, "cu": 3, "cubed": 3}
_PHRASES = {"per": "/", "mph": "mile / hour", "kmh": "kilometer / hour", "kph": "kilometer / hour"}


def _known() -> dict[str, Unit]:
    """Return the units by their symbols and names."""
    names = {name: Unit(Fraction(size), kind) for kind, sizes in _FACTORS.items() for name, size in sizes.items()}
    names["liter"] = Unit(Fraction(1, 1000), "length", 3)
    found = {}
    for symbol, name in _METRIC.items():
        unit = found[symbol] = found[name] = names.get(name, Unit(Fraction(1), name))
        for short, long, size in _PREFIXES:
            scaled = unit._replace(factor=unit.factor * Fraction(size))
            found |= {short + symbol: scaled, long + name: scaled, long + symbol: scaled}
    synonyms = {
        word: names.get(name, Unit(Fraction(1), name)) for name, words in _SYNONYMS.items() for word in words.split()
    }
    return found | names | synonyms


KNOWN_UNITS = _known()
"""Units by their symbols and names."""

Measure = tuple[Fraction, frozenset[tuple[str, int]]]
"""Factor of a unit, and the exponents of its kinds, such as 1 for length and -1 for time."""


@lru_cache(maxsize=1024)
def measure(text: str) -> Measure:
    """Return the factor and the kinds of a unit; an unknown word is a kind that only equals itself."""
    words = " ".join(_PHRASES.get(word.lower(), word) for word in text.split()).split()
    if {"celsius", "fahrenheit"} & {word.lower() for word in words}:
        words = [word for word in words if _unit(word).kind != "degree"]
    factor, kinds, power, last = Fraction(1), dict[str, int](), 1, (Unit(Fraction(1), ""), 0)
    for word in words:
        name, _, exponent = word.partition("^")
        if word == "/":
            power = -abs(power)
            continue
        if name.lower() in _POWERS and not (name.endswith("ed") and last[1]):
            power *= _POWERS[name.lower()]
            continue
        if name.lower() in _POWERS:
            unit, times = last[0], last[1] * (_POWERS[name.lower()] - 1)
        else:
            unit, times = _unit(name), power * int(exponent or 1)
            last = unit, times
        factor *= unit.factor**times
        kinds[unit.kind] = kinds.get(unit.kind, 0) + unit.power * times
        power = 1
    return factor, frozenset((kind, power) for kind, power in kinds.items() if power and kind != "radian")


def _unit(word: str) -> Unit:
    lower = word.lower().replace("metre", "meter").replace("litre", "liter")
    singular = _singular(lower)
    return KNOWN_UNITS.get(word) or KNOWN_UNITS.get(lower) or KNOWN_UNITS.get(singular) or Unit(Fraction(1), singular)


def _singular(word: str) -> str:
    if word.endswith("ies") and len(word) > 4:
        return word[:-3] + "y"
    if word.endswith(("ches", "shes", "xes", "sses")):
        return word[:-2]
    return word[:-1] if word.endswith("s") and not word.endswith("ss") and len(word) > 2 else word


def amount_of(parts: Sequence[Quantity]) -> tuple[frozenset[tuple[str, int]], Expr] | None:
    """Return the kinds of an amount, and its total in the base units; None if the parts are of several kinds."""
    measures = [measure(part.unit) for part in parts]
    if len({kinds for _, kinds in measures}) != 1:
        return None
    sizes = [operation("mul", part.expr, number(factor)) for part, (factor, _) in zip(parts, measures, strict=True)]
    return measures[0][1], sizes[0] if len(sizes) == 1 else operation("add", *sizes)


def with_letters_as_units(expr: Expr) -> Quantity | None:
    """Return a product of a number and letters of units, such as 5 m / s, as a quantity; None for other formulas."""
    numbers, units = [number(1)], list[str]()
    rest = [(expr, 1)]
    while rest:
        factor, power = rest.pop()
        if not factor.symbols():
            numbers.append(operation("pow", factor, number(power)))
        elif factor.head == "symbol" and factor.args[0] in (*_METRIC, "h"):
            units.append(f"{factor.args[0]}^{power}")
        elif factor.head == "mul":
            rest += [(each, power) for each in factor.args]
        elif factor.head == "div":
            rest += [(factor.args[0], power), (factor.args[1], -power)]
        elif factor.head == "pow" and (times := real(factor.args[1])) is not None and times == int(times):
            rest.append((factor.args[0], power * int(times)))
        else:
            return None
    return Quantity(operation("mul", *numbers), " ".join(units))


NO_MEASURE, DEGREE = measure(""), measure("degree")
