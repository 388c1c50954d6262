"""Explanations of the metrics, from the table of docs/metrics.md."""

import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

_PACKAGE = Path(__file__).parents[1]
_PLACEHOLDER = re.compile(r"\*|<\w+>")
"""Placeholder in a metric's name, which stands for several names."""


class Explanation(NamedTuple):
    """Row of the table of metrics.

    Attributes:
      pattern: Regular expression for the names of the explained metrics, valid in Python and in JavaScript.
      meaning: Markdown text, as are `healthy` and `otherwise`.
      healthy: Values to expect; empty if there are none.
      otherwise: Advice if values are not healthy; empty if there is none.
    """

    pattern: str
    meaning: str
    healthy: str
    otherwise: str


@cache
def explanations() -> tuple[Explanation, ...]:
    """Read the rows of the metrics page that the package ships, in the order of the page."""
    installed = Path(__file__).with_name("metrics.md")  # location in a wheel
    page = installed if installed.is_file() else _PACKAGE.parent / "docs" / "metrics.md"
    return tuple(map(_explanation, re.findall(r"^\| `.*$", page.read_text("utf-8"), re.MULTILINE)))


def _explanation(row: str) -> Explanation:
    cells = [cell.strip() for cell in row.strip().strip("|").split("|")]
    named, meaning, healthy, otherwise = cells
    names = re.findall("`(.+?)`", re.sub(r"\(.*?\)", "", named))
    return Explanation(f"^(?:{'|'.join(map(_pattern, names))})$", meaning, healthy, otherwise)


def _pattern(name: str) -> str:
    parts = [re.sub(r"[.+?^$()|\[\]\\]", r"\\\g<0>", part) for part in _PLACEHOLDER.split(name)]
    return "[\\w@-]+".join(parts)
