"""Words and signs of answers, from words.toml."""

import tomllib
from pathlib import Path
from typing import Any

_TABLE: dict[str, Any] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))

FUNCTIONS, SHORT_WORDS, UNITS, GREEK, NOISE, VERBS = (
    frozenset(_TABLE[name].split()) for name in ("functions", "short_words", "units", "greek", "noise", "verbs")
)
"""Sets of words; words.toml describes each set."""
SIGNS: dict[str, str] = _TABLE["signs"]
"""LaTeX or ASCII spelling of Unicode characters."""
FRACTIONS: dict[str, tuple[int, int]] = {sign: (top, bottom) for sign, (top, bottom) in _TABLE["fractions"].items()}
"""Numerator and denominator of Unicode fraction characters."""
_ONES, _TENS, _ORDINALS = (_TABLE[name].split() for name in ("ones", "tens", "ordinals"))
NUMBERS: dict[str, int] = {
    **{word: value for value, word in enumerate(_ONES)},
    **{ten + one: 10 * tens + ones for tens, ten in enumerate(_TENS, 2) for ones, one in enumerate(["", *_ONES[1:10]])},
}
"""Numbers from 0 to 99 in words, without spaces and hyphens."""
ORDINALS: dict[str, int] = {word: value for value, word in enumerate(_ORDINALS, 1)}
"""Ordinal numbers in words."""
