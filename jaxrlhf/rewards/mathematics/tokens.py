"""Tokenizer for answers in LaTeX or plain text."""

import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from jaxrlhf.rewards.mathematics.spelling import closes
from jaxrlhf.rewards.mathematics.units import KNOWN_UNITS
from jaxrlhf.rewards.mathematics.words import FUNCTIONS, SHORT_WORDS, UNITS

CONSTANTS = {"pi": "pi", "infty": "infinity", "infinity": "infinity", "inf": "infinity"}
_ALIASES = {"asin": "arcsin", "acos": "arccos", "atan": "arctan", "sen": "sin", "tg": "tan"}
_TOKEN = re.compile(
    r"""
    (?P<space>\s+)
  | \\(?P<command>[A-Za-z]+\*?)
  | \\(?P<escaped>.)
  | (?P<number>(?:\d+(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+(?![\w.]))?)
  | (?P<letters>[A-Za-z]+)
  | (?P<ellipsis>\.\.\.)
  | (?P<relation><=|>=|!=|==)
  | (?P<power>\*\*)
  | (?P<sign>.)
    """,
    re.VERBOSE | re.DOTALL,
)
_REPEATING = re.compile(
    r"(?<![\d.])(\d*)\.(\d*)(?:\\(?:overline|bar|dot|overbar)\s*(?:\{\s*(\d+)\s*\}|(\d))|\((\d+)\)(?!\s*\())"
)
_TEXTS = ("text", "textrm", "textbf", "textit", "textsf", "mbox", "hbox", "mathrm", "operatorname", "operatorname*",
          "mathbf", "mathsf", "vec", "hat", "mathnormal", "texttt", "mathtt", "mathcal", "overrightarrow")  # fmt: skip
_AFTER_UNIT = re.compile(r"\s+\d|\s*/\s*([A-Za-z]+)")
_DRESSED = ("mathbf", "vec", "hat", "overrightarrow", "mathcal")
OPENED, CLOSED = (
    ("(", "[", "\\{", "{", "langle", "lfloor", "lceil"),
    (")", "]", "\\}", "}", "rangle", "rfloor", "rceil"),
)
"""Opening and closing brackets."""


class Unread(ValueError):
    """Error: a text is not an answer of a known form."""


@dataclass(frozen=True)
class Token:
    """Number, letter, word, command or sign.

    Attributes:
      kind: `number`, `letter`, `word`, `function`, `constant`, `vector`, `command` or `sign`.
      text: Name or sign.
      value: Value of a number.
      spaced: True if a space precedes the token.
    """

    kind: str
    text: str
    value: Any = None
    spaced: bool = False


def is_word(letters: str) -> bool:
    """Return whether consecutive letters are a word or a unit rather than a product of variables."""
    if (letters in UNITS and len(letters) > 1) or letters.lower() in SHORT_WORDS:
        return True
    if len(letters) < 3 or set(letters) <= set("abcdxyzABCDXYZ"):
        return False
    return any(letter in "aeiouyAEIOUY" for letter in letters) or (letters.isupper() is False and len(letters) > 4)


def tokens_of(text: str) -> list[Token]:
    """Split an answer into tokens.

    Raises:
      Unread: A brace is not closed.
    """
    text = _REPEATING.sub(_fraction, text)
    found: list[Token] = []
    place, spaced = 0, False
    while place < len(text):
        match = _TOKEN.match(text, place)
        assert match is not None, "every character is a token"
        place = match.end()
        kind, part = match.lastgroup, match[0]
        if kind == "space":
            spaced = True
            continue
        if kind == "command" and match["command"] in _TEXTS and text[place:].lstrip().startswith("{"):
            start = place + len(text[place:]) - len(text[place:].lstrip())
            end = closes(text, start)
            if end is None:
                raise Unread("a brace is not closed")
            found += _text_tokens(match["command"], text[start + 1 : end], spaced)
            place = end + 1
        elif kind == "command" and match["command"] == "rationalnumber":
            end = text.index("}", place)
            top, bottom = text[place + 1 : end].split("/")
            found.append(Token("number", part, Fraction(int(top), int(bottom)), spaced))
            place = end + 1
        else:
            unit = part == "min" and not text[place:].lstrip().startswith(("(", "{", "_"))
            if kind == "letters" and spaced and found and found[-1].kind == "number":
                unit |= len(part) > 1 and not part.islower() and part in KNOWN_UNITS
            if part in UNITS and spaced and found and found[-1].kind == "number":
                after = _AFTER_UNIT.match(text, place)
                unit |= after is not None and after[1] in (None, *UNITS)
            found += [Token("word", part, None, spaced)] if unit else _tokens(kind or "", match, part, spaced)
        spaced = False
    return found


def _tokens(kind: str, match: re.Match[str], part: str, spaced: bool) -> list[Token]:
    match kind:
        case "number":
            if len(part) > 400 or abs(int(re.split("[eE]", part)[1]) if re.search("[eE]", part) else 0) > 4000:
                raise Unread("the number is too long")
            return [Token("number", part, Fraction(part), spaced)]
        case "letters":
            return _letters(part, spaced)
        case "command":
            name = match["command"]
            if name in FUNCTIONS or name in _ALIASES:
                return [Token("function", _ALIASES.get(name, name), None, spaced)]
            if name in CONSTANTS:
                return [Token("constant", CONSTANTS[name], None, spaced)]
            return [Token("command", name, None, spaced)]
        case "escaped":
            return [Token("sign", {"{": "\\{", "}": "\\}", "%": "%", "$": "$", "&": "&", "|": "||"}.get(
                match["escaped"], "\\" + match["escaped"]), None, spaced)]  # fmt: skip
        case "relation":
            names = {"<=": "le", ">=": "ge", "!=": "ne"}
            return [Token("command", names[part], None, spaced) if part in names else Token("sign", "=", None, spaced)]
        case "power":
            return [Token("sign", "^", None, spaced)]
    return [Token("sign", part, None, spaced)]


def _letters(part: str, spaced: bool) -> list[Token]:
    if part in FUNCTIONS or part.lower() in _ALIASES:
        return [Token("function", _ALIASES.get(part.lower(), part), None, spaced)]
    if part in CONSTANTS:
        return [Token("constant", CONSTANTS[part], None, spaced)]
    if len(part) > 1 and is_word(part):
        return [Token("word", part, None, spaced)]
    return [Token("letter", letter, None, spaced and not index) for index, letter in enumerate(part)]


def _text_tokens(command: str, inside: str, spaced: bool) -> list[Token]:
    """Tokenize the argument of a text command, as a formula if it is one, else as words."""
    bare = inside.strip()
    if command in _DRESSED and re.fullmatch(r"[A-Za-z]{1,2}", bare):
        return [Token("vector", f"{command} {bare}", None, spaced)]
    if re.fullmatch(r"[-+\d.,\s/^{}()=\\%$]*\d[-+\d.,\s/^{}()=\\%$]*", bare) or re.fullmatch(r"\\[A-Za-z]+.*", bare):
        return tokens_of(inside)
    if re.fullmatch(r"[A-Za-z]", inside) and not command.startswith("text"):  # `\\mathrm{~m}` is a unit
        return [Token("letter", bare, None, spaced)]
    if bare.lower() in CONSTANTS:
        return [Token("constant", CONSTANTS[bare.lower()], None, spaced)]
    if bare in FUNCTIONS and bare != "min":
        return [Token("function", bare, None, spaced)]
    tokens: list[Token] = []
    inside = re.sub(r"\\cdot\b", " ", inside)  # between units
    for word in re.findall(r"[^\W\d_]+(?:['\-.][^\W\d_]+)*\.?|\d+(?:\.\d+)?|[^\s]", inside):
        if word[0].isdigit():
            tokens.append(Token("number", word, Fraction(word), True))
        elif word[0].isalpha():
            tokens.append(Token("word", word.rstrip("."), None, True))
        else:
            tokens.append(Token("sign", word, None, True))
    return tokens


def _fraction(found: re.Match[str]) -> str:
    """Return a repeating decimal as an exact fraction, in the internal command `rationalnumber`."""
    whole, fixed, *cycles = found.groups()
    cycle = next(each for each in cycles if each)
    shift, nines = 10 ** len(fixed), 10 ** len(cycle) - 1
    value = Fraction(int((whole + fixed) or 0)) / shift + Fraction(int(cycle), nines * shift)
    return rf" \rationalnumber{{{value.numerator}/{value.denominator}}}"


def is_name(tokens: list[Token]) -> bool:
    """Return whether tokens before an equals sign are a name rather than a formula."""
    if [token.text for token in tokens[1:6]] == ["^", "{", "-", "1", "}"]:  # the name of an inverse function
        tokens = [*tokens[:1], *tokens[6:]]
    texts = [token.text for token in tokens]
    product = "(" in (texts[0], *texts[1:2]) and texts[0] in (*"(abckmnxyz",) and "," not in texts
    if product and {"+", "-"} & {*texts} and not {"f", "g", "h"} & {*texts}:
        return False  # (x + 1)(x - 2) or x(x - 2), and not (f + g)(x)
    depth, before = 0, ""
    for token in tokens:
        depth += (token.text in OPENED) - (token.text in CLOSED)
        if token.kind == "number" and depth == 0 and before != "_":
            return False
        if depth == 0 and token.kind == "sign" and token.text in ("+", "-", "*", "/", "^", "%", "!", ":"):
            return False
        if token.kind == "function" or (
            token.kind == "command" and token.text in ("frac", "sqrt", "times", "cdot", "begin")
        ):
            return False
        before = token.text
    letters = [token for token in tokens if token.kind == "letter"]
    plain = all(token.kind == "letter" for token in tokens)
    return not (plain and len(letters) > 1 and any(letter.text in "xyz" for letter in letters))
