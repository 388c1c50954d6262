"""Comparison of multiple-choice options."""

import re

from jaxrlhf.rewards.mathematics.spelling import plain, undressed

_LETTER = re.compile(r"(?:(?:OPTION|CHOICE)\s+)?[\[(]?\s*([A-J])\s*[\])]?")
_LABELLED = re.compile(r"\\text(?:bf|rm|it)?\s*\{\s*\(?[A-J][).]\s*\}(?:\s|~|\\[ ,;:!]|\\quad)*(\S.*)", re.DOTALL)
_CHOSEN = re.compile(
    r"(?:option|choice|answer)?\s*[\[(]?\s*([A-J])\s*(?:[\])]\s*[.:]?|[.:]|\)\s*)\s*(\S.*)?", re.IGNORECASE | re.DOTALL
)


def same_option(given: str, expected: str) -> bool:
    """Return whether an answer chooses the reference's option; the reference must be a single letter."""
    wanted = _LETTER.fullmatch(re.sub("(?i)^(option|choice)", lambda word: word[0].upper(), _bare(expected)))
    if wanted is None:
        return False
    bare = _bare(given)
    chosen = _LETTER.fullmatch(bare.upper()) or _CHOSEN.fullmatch(bare)
    return chosen is not None and chosen[1].upper() == wanted[1]


def text_of_option(given: str) -> str | None:
    """Return the text after the letter of an option, such as 15 of `(A) 15`; None if there is no option's letter."""
    found = _LABELLED.match(plain(given).strip())
    return None if found is None else found[1]


def _bare(text: str) -> str:
    text = re.sub(r"\\(?:text|textbf|textrm|mathrm|mathbf|mbox|textit)\s*\{([^{}]*)\}", r"\1", undressed(text))
    return text.replace("{", "").replace("}", "").strip()
