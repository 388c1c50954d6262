"""Does the response have the asked-for shape?"""

import re
from collections.abc import Mapping
from typing import Any


def matches(prompt: str, response: str, answer: str | None, record: Mapping[str, Any], *, pattern: str) -> float:
    """1 if the whole response matches `pattern`, else 0.

    Some patterns backtrack for ever on some texts; the pool's time limit ends those.
    """
    return float(re.fullmatch(pattern, response) is not None)


def check_pattern(pattern: str) -> None:
    """Raise `ValueError` unless `pattern` is a regular expression."""
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"format pattern {pattern!r} is not a regular expression: {error}") from error
