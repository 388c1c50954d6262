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
