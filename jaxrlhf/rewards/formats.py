"""Format rewards: a regular expression, and tags."""

import re
from collections.abc import Mapping
from typing import Any

from jaxrlhf.config import Refusal


def matches(prompt: str, response: str, answer: str | None, record: Mapping[str, Any], *, pattern: str) -> float:
    """Return 1 if the whole response matches `pattern`, else 0.

    Some patterns backtrack forever on some texts; the pool's time limit ends such calls.
    """
    return float(re.fullmatch(pattern, response) is not None)


def tags(prompt: str, response: str, answer: str | None, record: Mapping[str, Any], *, names: tuple[str, ...]) -> float:
    """Return the share of tags, such as `think` and `answer`, that are used correctly.

    A tag is used correctly if it is opened once and closed once, and opened after the previous correct tag is closed.
    """
    used, free_from = 0, 0
    for name in names:
        opening, closing = f"<{name}>", f"</{name}>"
        start, end = response.find(opening), response.find(closing)
        once = response.count(opening) == response.count(closing) == 1
        if once and free_from <= start < end:
            used += 1
            free_from = end + len(closing)
    return used / len(names)


def check_pattern(pattern: str) -> None:
    """Raise `Refusal` unless `pattern` is a regular expression."""
    try:
        re.compile(pattern)
    except re.error as error:
        raise Refusal(f"format pattern {pattern!r} is not a regular expression: {error}") from error
