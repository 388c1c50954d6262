"""Units of quantities: synonyms, and conversion of amounts to a common unit."""

from collections.abc import Sequence
from fractions import Fraction

from jaxrlhf.rewards.mathematics.expressions import Expr, number, operation
from jaxrlhf.rewards.mathematics.values import Quantity

_FACTORS: dict[str, dict[str, Fraction]] = {
    "time": {"second": Fraction(1), "minute": Fraction(60), "hour": Fraction(3600), "day": Fraction(86400),
             "week": Fraction(604800)},
    "length": {"millimeter": Fraction(1, 1000), "centimeter": Fraction(1, 100), "meter": Fraction(1),
               "kilometer": Fraction(1000)},
    "imperial length": {"inch": Fraction(1), "foot": Fraction(12), "yard": Fraction(36), "mile": Fraction(63360)},
    "money": {"cent": Fraction(1, 100), "dollar": Fraction(1)},
    "weight": {"milligram": Fraction(1, 1000), "gram": Fraction(1), "kilogram": Fraction(1000)},
    "imperial weight": {"ounce": Fraction(1), "pound": Fraction(16)},
    "volume": {"milliliter": Fraction(1, 1000), "liter": Fraction(1)},
}  # fmt: skip
_NAMES = {
    **dict.fromkeys(("s", "sec", "secs"), "second"), **dict.fromkeys(("min", "mins"), "minute"),
    **dict.fromkeys(("h", "hr", "hrs"), "hour"), "mm": "millimeter", "cm": "centimeter", "m": "meter",
    "km": "kilometer", **dict.fromkeys(("in", "inches"), "inch"), **dict.fromkeys(("ft", "feet"), "foot"), "yd": "yard",
    "mi": "mile", "¢": "cent", "g": "gram", "kg": "kilogram", "mg": "milligram", "oz": "ounce",
    **dict.fromkeys(("lb", "lbs"), "pound"), "ml": "milliliter", "l": "liter", "usd": "dollar", "bucks": "dollar",
    "metre": "meter", "centimetre": "centimeter", "kilometre": "kilometer", "millimetre": "millimeter",
    "litre": "liter", "millilitre": "milliliter", "degrees": "degree", "deg": "degree",
    "people": "person", "children": "child", "men": "man", "women": "woman", "mph": "mile / hour",
    "kmh": "kilometer / hour", "kph": "kilometer / hour", "per": "/",
}  # fmt: skip
_SQUARED, _CUBED = ("square", "squared", "sq"), ("cubic", "cubed")


def unit_of(text: str) -> str:
    """Return the canonical name of a unit, in the singular."""
    words = []
    for word in text.split():
        power = ""
        if "^" in word:
            word, _, power = word.partition("^")
        name = _NAMES.get(word) or _NAMES.get(word.removesuffix("s")) or _singular(word)
        words.append(f"{name}^{power}" if power else name)
    for markers, power in ((_SQUARED, "2"), (_CUBED, "3")):
        for marker in markers:
            if marker in words and len(words) > 1:
                words.remove(marker)
                words[0] += f"^{power}"
    return " ".join(words)


def _singular(word: str) -> str:
    if word.endswith("ies") and len(word) > 4:
        return word[:-3] + "y"
    if word.endswith(("ches", "shes", "xes", "sses")):
        return word[:-2]
    return word[:-1] if word.endswith("s") and not word.endswith("ss") and len(word) > 2 else word


def amount_of(parts: Sequence[Quantity]) -> tuple[str, Expr] | None:
    """Return the kind of an amount, such as `time`, and its total in the kind's base unit, the unit with factor 1.

    The result is None if a unit is unknown or the units are of several kinds.
    """
    for kind, factors in _FACTORS.items():
        if all(unit_of(part.unit) in factors for part in parts):
            sizes = [operation("mul", part.expr, number(factors[unit_of(part.unit)])) for part in parts]
            return kind, sizes[0] if len(sizes) == 1 else operation("add", *sizes)
    return None
