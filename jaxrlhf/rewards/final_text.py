"""Text of a response after its thinking, and numbers with gaps between thousands."""

import re
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

_BEGIN, _END = "<think>", "</think>"
_GAPS = re.compile(
    r"(?<![\d.,^_])(\d{1,3})((?:(?:\{,\}|,\\!|\\[ ,:;!]|[~ '_\u2019\u00a0\u2009\u202f])\d{3})+)(?!\d|[ ~]?/\d)"
)


def answered(prompt: str, response: str, read: Callable[[str], T | None], *, in_thinking: bool) -> T | None:
    """Return what `read` finds after the thinking, else, with `in_thinking`, in the whole response."""
    found = read(after_thinking(prompt, response))
    return read(response) if found is None and in_thinking else found


def after_thinking(prompt: str, response: str) -> str:
    """Return the text after the last end of thinking; empty if the response was truncated inside its thinking."""
    rest = response.rpartition(_END)[2]
    if rest == response and prompt.rstrip().endswith(_BEGIN):
        return ""  # the prompt started the thinking, and the response did not end it
    return rest.rpartition(_BEGIN)[0] if _BEGIN in rest else rest


def without_gaps(text: str) -> str:
    """Remove spaces and LaTeX commas between the thousands of numbers: `1{,}000` becomes 1000."""
    return _GAPS.sub(lambda found: found[1] + re.sub(r"\D", "", found[2]), text)
