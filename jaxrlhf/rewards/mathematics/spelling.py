"""Normalization of an answer's spelling: Unicode, formatting commands, spaces, thousands separators, punctuation."""

import re

from jaxrlhf.rewards.final_text import without_gaps
from jaxrlhf.rewards.mathematics.words import FRACTIONS, SIGNS

_TABLE = str.maketrans(SIGNS | {sign: rf"\frac{{{p}}}{{{q}}}" for sign, (p, q) in FRACTIONS.items()})

_RUNS = re.compile(r"(?:\^\{[-\dn]*\}){2,}|(?:_\{[-\dn]*\}){2,}")
_DRESS = re.compile(
    r"\\(?:displaystyle|textstyle|scriptstyle|left|right|middle|[bB]igg?[lrm]?|limits|nolimits|bf|it|rm|large|Large|"
    r"LARGE|huge|Huge|small|normalsize|bfseries|centering|boldmath|quad|qquad|ensuremath|thinspace|negthinspace)"
    r"(?![A-Za-z])"
)
_WRAPS = re.compile(
    r"\\(?:bm|boldsymbol|underline|uline|emph|textcolor\s*\{[^{}]*\}|color\s*\{[^{}]*\}|colorbox\s*\{[^{}]*\}|mathit|"
    r"mathsf|mathtt|boxed|fbox|framebox|cancel|displaylines)(?=\s*\{|\s)"
)
_SPACES = re.compile(r"\\(?:[hv]?phantom|[hv]space\*?)\s*\{[^{}]*\}|(?<!\\)\\[,;:!> ]|~|&nbsp;")
_ENVIRONMENT = re.compile(
    r"\\(?:begin|end)\s*\{(?:aligned|align|align\*|equation|equation\*|gathered|split|gather\*?)\}"
)
_EMPHASIS = re.compile(r"(?<![\w*])(\*\*|__|\*|`)(?=\S)(.*?\S)\1(?![\w*])")
_HALF_DAY = re.compile(r"(?<=:\d\d)\s*([ap])\.\s?m\b", re.IGNORECASE)
_COMMAS = re.compile(r"(?<![\d.,^_])\d{1,3}(?:,\d{3})+(?!\d|,\d)")
_PUNCTUATION = " \t\n.,;:?"


def plain(text: str) -> str:
    """Return a text with Unicode characters as LaTeX or ASCII, and numbers without gaps between thousands."""
    text = without_gaps(text)
    text = re.sub(rf"(?<=\d)\s*(?=[{''.join(FRACTIONS)}])", " ", text)
    text = text.translate(_TABLE)
    return _RUNS.sub(_joined, text)


def _joined(found: re.Match[str]) -> str:
    """Join adjacent superscripts, or adjacent subscripts, into one."""
    return found[0][0] + "{" + re.sub(r"[\^_{}]", "", found[0]) + "}"


def undressed(text: str) -> str:
    """Return an answer without formatting commands and without punctuation at its ends."""
    text = plain(text)
    text = re.sub(r"\\begin\{(array|tabular)\}\s*\{[^{}]*\}", r"\\begin{\1}", text)
    text = _ENVIRONMENT.sub(" ", text)
    text = re.sub(r"\\[dtc]frac(?![A-Za-z])", r"\\frac", text)
    text = re.sub(r"\\(?:leq|leqslant|leqq)(?![A-Za-z])", r"\\le", text)
    text = re.sub(r"\\(?:geq|geqslant|geqq)(?![A-Za-z])", r"\\ge", text)
    text = re.sub(r"\\(?:varnothing|O)(?![A-Za-z])", r"\\emptyset", text)
    text = re.sub(r"\\(?:lbrace|\{)", r"\\{", re.sub(r"\\(?:rbrace|\})", r"\\}", text))
    text = re.sub(r"^(\\\{[^|{}]*)\|([^|]*\\\})$", r"\1\\mid \2", text.strip())
    text = re.sub(r"\\(?:degree|textdegree)(?![A-Za-z])", r"^\\circ", text)
    text = re.sub(r"\\(?:dots|ldots|cdots)(?![A-Za-z])", "...", text)
    text = re.sub(r"\\left\s*\.|\\right\s*\.", " ", text)
    text = _DRESS.sub(" ", text)
    text = _SPACES.sub(" ", text)
    for _ in range(4):
        text = _WRAPS.sub(" ", text)
    text = _EMPHASIS.sub(r"\2", _HALF_DAY.sub(r" \1m", text))
    text = re.sub(r"\\[\(\)\[\]]|\\?\$(?=\s*$)|^\s*\$|(?<!\\)\$", " ", text)
    return stripped(text)


def without_commas(text: str) -> str:
    """Remove commas between the thousands of numbers.

    A text with brackets stays unchanged, because its commas separate values, unless a comma is followed by a space.
    """
    if re.search(r"[(\[]|\\\{|langle", text) and not re.search(r",\s", text):
        return text
    return _COMMAS.sub(lambda found: found[0].replace(",", ""), text)


def stripped(text: str) -> str:
    """Return a text without punctuation and backslashes at its ends, and without braces around the whole text."""
    before = None
    while before != text:
        before = text
        text = text.strip().rstrip(_PUNCTUATION).lstrip(" \t\n,;:").strip()
        text = re.sub(r"\\+$", "", text)
        if text.startswith("{") and closes(text, 0) == len(text) - 1:
            text = text[1:-1]
    return text


def closes(text: str, place: int) -> int | None:
    """Return the index of the bracket that closes the bracket at `place`; None if there is none."""
    opened, closed = text[place], {"{": "}", "(": ")", "[": "]"}[text[place]]
    depth = 0
    for index in range(place, len(text)):
        if index and text[index - 1] == "\\" and opened == "{":
            continue
        depth += (text[index] == opened) - (text[index] == closed)
        if depth == 0:
            return index
    return None
