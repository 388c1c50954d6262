"""Text of an answer to its value."""

import re
from functools import lru_cache
from typing import Any

from jaxrlhf.rewards.mathematics.grammar import AnswerReader
from jaxrlhf.rewards.mathematics.spelling import undressed, without_commas
from jaxrlhf.rewards.mathematics.tokens import Unread, tokens_of
from jaxrlhf.rewards.mathematics.values import Items, Relation, Words

_TEXT_COMMANDS = re.compile(r"\\(?:text|textbf|textrm|textit|mathrm|mbox)(?![a-z])")


@lru_cache(maxsize=4096)
def read_answer(bare: str) -> Any:
    """Return the value of an undressed answer; words if the answer is no mathematics that can be read."""
    try:
        return AnswerReader(tokens_of(bare)).answer()
    except (Unread, RecursionError):
        return Words(squeezed(bare).lower())


def is_mathematics(text: str) -> bool:
    """Return whether a text can be read as a whole, and is not words or a list that has words."""
    value = read_answer(without_commas(undressed(text)))
    parts = value.values if isinstance(value, Items) else (value,)
    last = [part.sides[-1] if isinstance(part, Relation) else part for part in parts]
    return not any(isinstance(part, Words) for part in last)


def squeezed(text: str) -> str:
    """Return a text without spaces and without what only changes its looks."""
    bare = _TEXT_COMMANDS.sub("", undressed(text))
    kept = "".join(letter for letter in bare if not letter.isspace() and letter not in "{}\\")
    return re.sub(r"(?<!\d)\.(?!\d)|\.$", "", kept).strip(",;:?")
