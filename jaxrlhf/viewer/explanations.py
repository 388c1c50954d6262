"""Explanations of the metrics, from the table of docs/metrics.md."""

import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

_PACKAGE = Path(__file__).parents[1]
_OPEN = re.compile(r"\*|<\w+>")
"""Part of a name that stands for several."""


class Explanation(NamedTuple):
    """A row of the table.

    Attributes:
      pattern: Regular expression, for Python and for JavaScript, of the names that it explains.
      meaning: Markdown, as the other two.
      healthy: Values to expect; empty if none are.
      otherwise: Advice where it is not so; empty if there is none.
    """

    pattern: str
    meaning: str
    healthy: str
    otherwise: str


@cache
def explanations() -> tuple[Explanation, ...]:
    """The rows of the page that the package ships, in its order."""
    installed = Path(__file__).with_name("metrics.md")  # where the wheel carries it
    page = installed if installed.is_file() else _PACKAGE.parent / "docs" / "metrics.md"
    return tuple(map(_explanation, re.findall(r"^\| `.*$", page.read_text("utf-8"), re.MULTILINE)))


def _explanation(row: str) -> Explanation:
    cells = [cell.strip() for cell in row.strip().strip("|").split("|")]
    named, meaning, healthy, otherwise = cells
    names = re.findall("`(.+?)`", re.sub(r"\(.*?\)", "", named))
    return Explanation(f"^(?:{'|'.join(map(_pattern, names))})$", meaning, healthy, otherwise)


def _pattern(name: str) -> str:
    parts = [re.sub(r"[.+?^$()|\[\]\\]", r"\\\g<0>", part) for part in _OPEN.split(name)]
    return "[\\w@-]+".join(parts)
