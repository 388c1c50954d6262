"""Normalization of an answer's spelling: Unicode, formatting commands, spaces, thousands separators, punctuation."""

import re
from functools import lru_cache

from jaxrlhf.rewards.final_text import without_gaps
from jaxrlhf.rewards.mathematics.words import FRACTIONS, SIGNS

_TABLE = str.maketrans(SIGNS | {sign: rf"\frac{{{p}}}{{{q}}}" for sign, (p, q) in FRACTIONS.items()})

_RUNS = re.compile(r"(?:\^\{[-\dn]*\}){2,}|(?:_\{[-\dn]*\}){2,}")
_DRESS = re.compile(
    r"\\(?:displaystyle|textstyle|scriptstyle|left|right|middle|[bB]igg?[lrm]?|limits|nolimits|bf|it|rm|large|Large|"
    r"LARGE|huge|Huge|small|normalsize|bfseries|centering|boldmath|quad|qquad|ensuremath|checkmark|thinspace|negthinspace)"
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
LONGEST = 2000
"""Maximum number of characters of an answer that is parsed; a longer answer is compared as text only."""
_INTEGERS = r"(?:(?:any|an|all|every|each|some)\s+)?integers?"
_BEFORE_SET = r"(^|[=,;(]\s*|\\(?:cup|cap|in|setminus)\s*)"
_NOTATIONS = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\{([^{}]*)\\over(?![A-Za-z])([^{}]*)\}", r"\\frac{\1}{\2}"),
        (r"\{([^{}]*)\\choose(?![A-Za-z])([^{}]*)\}", r"\\binom{\1}{\2}"),
        (r"(?i)^\\text\w*\s*\{\s*(?:the )?(?:final |correct )?answer\s*(?:is|:|=)\s*:?\s*\}", ""),
        (r"(?i)^(\\text\w*\s*\{)?\s*(?:the )?(?:final |correct )?answer\s*(?:is|:|=)\s*:?", r"\1"),
        (r"\\imath(?![A-Za-z])", "i"),
        # Intervals with outward brackets: ]2,5[ is (2,5).
        (rf"{_BEFORE_SET}\]([^\[\],;]+[,;][^\[\],;]+)\[", r"\1(\2)"),
        (rf"{_BEFORE_SET}\]([^\[\],;]+[,;][^\[\],;]+)\]", r"\1(\2]"),
        (r"\[([^\[\],;]+[,;][^\[\],;]+)\[", r"[\1)"),
        # Sets by a condition: {x : x > 2} and {x | x > 2}.
        (r"^(\\\{[^|{}]*)\|([^|]*\\\})$", r"\1\\mid \2"),
        (r"^\\\{\s*([A-Za-z](?:\s*\\in[^:]*)?|.*?(?=\s*:\s*[a-z]\s*\\in))\s*:", r"\\{\1 \\mid "),
        (r"\\mathbb\s*\{?R\}?\s*(?:[\^_]\s*\{?\+\}?|_\s*\{\s*>\s*0\s*\})", r"(0,\\infty)"),
        # Memberships: `(k ∈ Z)`, `where k is an integer`.
        (rf"\\text\s*\{{([^{{}}]*\b(?:{_INTEGERS}|where|for|mod)\b[^{{}}]*)\}}", r" \1 "),
        (
            rf"(?<![\s,;(])[\s,;(]*(?:(?:where|for|with)\s)?\s*(?:{_INTEGERS}\s+([a-z])|([a-z])\s+is\s+{_INTEGERS})\b[\s)]*",
            r", \1\2\\in\\mathbb{Z}",
        ),
        (r"(?<![\s,;(])[\s,;(]*\b(?:where|for|with)\s+(?=[a-z]\s*\\in)", ", "),
        (r",?\s*\(\s*([a-z]\s*\\in\s*\\mathbb\s*\{?[A-Z]\}?)\s*\)", r", \1"),
        (r"\(\s*\\?(?:mod|bmod|operatorname\{mod\}|mathrm\{mod\})\s*\{?(\w+)\}?\s*\)", r"\\pmod{\1}"),
        (r"\\not\s*=", r"\\ne "),
        (r"\{:\}", ":"),
        (r"\\colon(?![A-Za-z])|(?<=\d)\s*(?:\\text\s*\{\s*)?\bto\b\s*\}?\s*(?=\d)", ":"),
        (r"(?<=\d)\s*[xX]\s*(?=10\s*\^)", r"\\times "),
        (r"\\dot\s*\{?(\d)\}?(\d*)\\dot\s*\{?(\d)\}?", r"\\overline{\1\2\3}"),
        (r"\(([A-Z\d]+)\)(?=_)", r"\1"),
        # Words and abbreviations at numbers: ordinals, units.
        (r"\\(?:text|mathrm)\s*\{(st|nd|rd|th)\}", r"\1"),
        (r"(?<=\d)(?:\^\s*)?(?:\{(?:st|nd|rd|th)\}|(?:st|nd|rd|th)(?![A-Za-z]))", " th"),
        (r"\bper cent\b", "percent"),
        (r"^USD\s*(?=\d)", r"\\$"),
        (r"(?<=\d)\s*\\Omega(?![A-Za-z])", r"\\text{ ohm}"),
        (r"\\frac\s*\{\\(?:text|mathrm)\{([^{}]*)\}\}\s*\{\\(?:text|mathrm)\{([^{}]*)\}\}", r"\\text{\1/\2}"),
        (r"\b(sq|cu|in|ft|yd|mi|hrs?|mins?|secs?|lbs?|oz|[ckm]m)\.(?!\d)", r"\1"),
        (r"\\mu\s*(?:\\(?:text|mathrm)\s*\{\s*)?(Hz|Pa|mol|[mgsLlFAVWJCTH])(?![A-Za-z])\}?", r"\\text{ micro\1}"),
        # Rows of a system: signs are no columns, and a wide gap separates equations.
        (r"\\\{\s*\\begin\s*\{(aligned|gathered|split|align\*?)\}(.*)\\end\s*\{\1\}", r"\\begin{cases}\2\\end{cases}"),
        (r"&\s*(?==|<|>|\\(?:le|ge|ne|equiv|in)(?![A-Za-z]))", ""),
    )
)
"""Notations of the same meaning, in the order in which they are replaced."""


def plain(text: str) -> str:
    """Return a text with Unicode characters as LaTeX or ASCII, and numbers without gaps between thousands."""
    text = without_gaps(text)
    text = re.sub(rf"(?<=\d)\s*(?=[{''.join(FRACTIONS)}])", " ", text)
    text = text.translate(_TABLE)
    return _RUNS.sub(_joined, text)


def _joined(found: re.Match[str]) -> str:
    """Join adjacent superscripts, or adjacent subscripts, into one."""
    return found[0][0] + "{" + re.sub(r"[\^_{}]", "", found[0]) + "}"


@lru_cache(maxsize=4096)
def undressed(text: str) -> str:
    """Return an answer without formatting commands and without punctuation at its ends."""
    text = plain(text)
    text = re.sub(r"\\begin\{(array|tabular)\}\s*\{[^{}]*\}", r"\\begin{\1}", text)
    text = re.sub(r"\\[dtc](frac|binom)(?![A-Za-z])", r"\\\1", text)
    text = re.sub(r"\\(?:leq|leqslant|leqq)(?![A-Za-z])", r"\\le", text)
    text = re.sub(r"\\(?:geq|geqslant|geqq)(?![A-Za-z])", r"\\ge", text)
    text = re.sub(r"\\(?:varnothing|O)(?![A-Za-z])", r"\\emptyset", text)
    text = re.sub(r"\\(?:lbrace|\{)", r"\\{", re.sub(r"\\(?:rbrace|\})", r"\\}", text))
    text = re.sub(r"\\(?:degree|textdegree)(?![A-Za-z])", r"^\\circ", text)
    text = re.sub(r"\\(?:dots|ldots|cdots)(?![A-Za-z])", "...", text)
    text = re.sub(r"\\left\s*\.|\\right\s*\.", " ", text)
    text = re.sub(r"(?<![a-z,;\s])(?<![a-z]\})\s*\\q?quad\s*(?=[A-Za-z](?:_\w)?\s*=)", ", ", text)
    text = _DRESS.sub(" ", text)
    text = " ".join(_SPACES.sub(" ", text).split())
    if len(text) <= LONGEST:
        for pattern, replacement in _NOTATIONS:
            text = pattern.sub(replacement, text)
    text = _ENVIRONMENT.sub(" ", text)
    for _ in range(4):
        text = _WRAPS.sub(" ", text)
    text = re.sub(r"^\s*\$(?=[\d.][^$]*$)", r"\\$", text)
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
