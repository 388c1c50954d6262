"""Parsing of an answer's text to a value."""

import re
from functools import lru_cache
from typing import Any

from jaxrlhf.rewards.mathematics.grammar import AnswerReader
from jaxrlhf.rewards.mathematics.spelling import undressed, without_commas
from jaxrlhf.rewards.mathematics.tokens import Unread, tokens_of
from jaxrlhf.rewards.mathematics.values import Items, Relation, Words

_TEXTS = re.compile(r"\\(?:text|textbf|textrm|textit|mathrm|mbox)\s*\{([^{}]*)\}")
_SPACES = re.compile(r"(?<!\d)\s+|\s+(?!\d)")


@lru_cache(maxsize=4096)
def read_answer(bare: str) -> Any:
    """Return the value of an answer from `undressed`; `Words` if the answer cannot be parsed as mathematics."""
    try:
        return AnswerReader(tokens_of(bare)).answer()
    except (Unread, RecursionError):
        return Words(squeezed(bare).lower())


def is_mathematics(text: str) -> bool:
    """Return whether a text can be parsed as a whole, and is neither words nor a list that contains words."""
    value = read_answer(without_commas(undressed(text)))
    parts = value.values if isinstance(value, Items) else (value,)
    last = [part.sides[-1] if isinstance(part, Relation) else part for part in parts]
    return not any(isinstance(part, Words) for part in last)


def squeezed(text: str) -> str:
    """Return a text without formatting commands and backslashes, and without spaces and braces that have no meaning.

    A space between digits stays, because `3 1/2` is not `31/2`; braces around several characters stay, because `2^{10}`
    is not `2^10`, which LaTeX reads as 2 to the power of 1, times 0.
    """
    bare = re.sub(r"\{(\w)\}", r"\1", _TEXTS.sub(r"\1", undressed(text)))
    kept = _SPACES.sub("", bare.replace(r"\\", ";")).replace("\\", "")
    return re.sub(r"(?<!\d)\.(?!\d)|\.$", "", kept).strip(",;:?")
