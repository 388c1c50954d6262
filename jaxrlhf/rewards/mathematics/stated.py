"""Search for the final answer that a response states."""

import re
from collections.abc import Sequence

from jaxrlhf.rewards.mathematics.reading import is_mathematics, read_answer
from jaxrlhf.rewards.mathematics.spelling import closes, undressed, without_commas
from jaxrlhf.rewards.mathematics.tokens import is_word
from jaxrlhf.rewards.mathematics.values import Words
from jaxrlhf.rewards.mathematics.words import FRACTIONS

_BOX = re.compile(r"\\(?:boxed|fbox|framebox)\s*(?=\{)")
_BARE_BOX = re.compile(r"\\(?:boxed|fbox)\s+(\\[A-Za-z]+(?:\s*\{[^{}]*\})*|[^\s\\{}$.,;]+)")
_TAGS = re.compile(r"<answer>(.*?)</answer>", re.DOTALL | re.IGNORECASE)
_FORMULA = re.compile(
    r"(?<!\\)\$\$(.+?)(?<!\\)\$\$|(?<![\\$])\$(?!\$)([^$\n]+?)(?<!\\)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL
)
_STATED = re.compile(
    r"\b(?:answers?|results?|solutions?|options?|choices?)[\s*_]*"
    r"(?:(?:is|are|be|equals?)\b(?:\s+(?:therefore|thus|then|hence|simply|indeed))?[\s,]*:?|:|=)[\s*_]*",
    re.IGNORECASE,
)
_EMPHASIS = re.compile(r"(?<![\w*)\]}])(\*\*|__|\*|`)(?=\S)(.+?)(?<=\S)\1(?![\w*])")
_SENTENCES = re.compile(r"(?<=[.!?])[ \t]+|\n+")
_WORD = re.compile(r"[^ \t\n]+")
_MATH = re.compile(rf"[\d\\^\u03c0\u221a\u221e{''.join(FRACTIONS)}]")
_MOST_WORDS = 24
"""Maximum number of words of a sentence that are searched for an answer in plain text."""
_FEW_WORDS = 2
_MARK = "####"


def stated_answer(text: str) -> str | None:
    """Return the final answer of a text; None if the text states none.

    The first of these that exists is the answer:

    - the last box, with earlier boxes that commas or `and` join to it
    - the content of the last `<answer>` tags
    - the text after the last `####`
    - the first formula after the last "answer is", else the plain text after it
    - the last formula
    - the last number, with all that belongs to it
    - the whole text, if it is one or two words
    """
    boxes = _boxes(text)
    if boxes is not None:
        return boxes
    tagged = _TAGS.findall(text)
    if tagged:
        inner = tagged[-1]
        return _boxes(inner) or _formula(inner) or _bare(inner) or None
    if _MARK in text:
        marked = text.rpartition(_MARK)[2].strip().split("\n")[0]
        return _formula(marked) or _bare(marked) or None
    phrases = list(_STATED.finditer(text))
    if phrases:
        rest = text[phrases[-1].end() :]
        return _formula(rest, first=True) or _beginning(_sentence(rest)) or _formula(text)
    found = _formula(text) or _ending(text)
    if found is None and len(text.split()) <= _FEW_WORDS:
        return _bare(text) or None
    return found


def reference_text(answer: str) -> str | None:
    """Return the answer in a reference: its boxes or formulas, else the whole reference; None if it is empty."""
    boxes = _boxes(answer)
    if boxes is not None:
        return boxes or None
    formulas = _formulas(answer)
    outside = re.sub(r"\b(?:and|or)\b", "", _FORMULA.sub(" ", answer))
    if formulas and not re.search(r"[^\W\d_]{2,}|\d", outside):
        return ", ".join(formulas).strip() or None
    if formulas and _STATED.search(answer):
        return formulas[-1]
    return answer.strip() if answer.strip(" \t\r\n$") else None


def read_as_text(answers: Sequence[str]) -> list[str]:
    """Return the references with digits or formulas that can only be compared as text; plain words are left out."""
    found = []
    for answer in answers:
        text = reference_text(answer)
        if text is None or not re.search(r"[\d\\^]", re.sub(r"\\(?:text|mathrm|mbox)[a-z]*", "", text)):
            continue
        if isinstance(read_answer(without_commas(undressed(text))), Words):
            found.append(answer)
    return found


def _bare(text: str) -> str:
    """Strip emphasis, and punctuation at the end, from plain text; an exclamation mark there is not a factorial."""
    return text.strip(" \t\n*_`").rstrip(" \t\n.,;:?!*_`")


def _boxes(text: str) -> str | None:
    """Return the content of the last box, with earlier boxes that belong to it; None without a box."""
    found: list[tuple[int, int, str]] = []
    for box in _BOX.finditer(text):
        end = closes(text, box.end())
        if end is not None and not (found and box.start() < found[-1][1]):
            found.append((box.start(), end + 1, text[box.end() + 1 : end]))
    if not found:
        bare = _BARE_BOX.findall(text)
        return bare[-1] if bare else None
    together = [found[-1]]
    for earlier in reversed(found[:-1]):
        between = text[earlier[1] : together[0][0]]
        joined = re.sub(r"[\s$]|\\[()\[\]]|\\text|[{}]|\\quad", "", between)
        if joined not in (",", ";", "and", "or", ",and", ",or", "&"):
            break
        together.insert(0, earlier)
    return ", ".join(inner for _, _, inner in together)


def _formulas(text: str) -> list[str]:
    """Return the formulas between dollar signs or LaTeX's formula brackets, except amounts of money."""
    return [inner for _, _, inner in _placed_formulas(text)]


def _placed_formulas(text: str) -> list[tuple[int, int, str]]:
    found = []
    for match in _FORMULA.finditer(text):
        inner = next(group for group in match.groups() if group is not None)
        money = match[2] is not None and re.match(r"\s*\d", inner) and re.match(r"\d", text[match.end() :])
        if inner.strip() and not money:
            found.append((match.start(), match.end(), inner))
    return found


def _formula(text: str, *, first: bool = False) -> str | None:
    """Return the last formula or, with `first`, the first; with the formulas that `and` or `or` joins to it.

    A comma joins formulas only in a list that ends with `and` or `or`. The result is None without a formula.
    """
    found = _placed_formulas(text)
    groups: list[list[str]] = []
    listed: list[bool] = []
    for place, (start, _, inner) in enumerate(found):
        between = text[found[place - 1][1] : start] if place else "."
        joiner = re.fullmatch(r"\s*(,?)\s*(and|or|)\s*", between)
        if joiner and (joiner[1] or joiner[2]):
            groups[-1].append(inner)
            listed[-1] = bool(joiner[2])
        else:
            groups.append([inner])
            listed.append(False)
    if not groups:
        return None
    place = 0 if first else -1
    group = groups[place]
    return ", ".join(group) if listed[place] else group[place]


def _sentence(text: str) -> str:
    """Return the first sentence of a text, without emphasis."""
    return _SENTENCES.split(_EMPHASIS.sub(r"\2", text.strip()))[0]


def _beginning(sentence: str) -> str | None:
    """Return the longest beginning of a sentence that is mathematics; the whole sentence if there is none."""
    words = _WORD.findall(sentence)
    for end in range(min(len(words), _MOST_WORDS), 0, -1):
        found = _readable(" ".join(words[:end]))
        if found is not None:
            return found
    return _bare(sentence) or None


def _ending(text: str) -> str | None:
    """Return the longest end, if it is mathematics, of the last sentence that contains a number or formula sign."""
    for sentence in reversed(_SENTENCES.split(_EMPHASIS.sub(r"\2", text))):
        words = _WORD.findall(sentence)[-_MOST_WORDS:]
        if not _MATH.search(" ".join(words)):
            continue
        for start in range(len(words)):
            found = _readable(" ".join(words[start:]))
            if found is not None and _MATH.search(found):
                return found
        numbers = [word for word in words if _MATH.search(word) and _readable(word) is not None]
        if numbers:
            return _readable(numbers[-1])
    return None


def _readable(text: str) -> str | None:
    """Return plain text without its final punctuation if the text is mathematics, else None.

    Words before an equals sign are not mathematics: `we get x = 2` is not, and `x = 2` is.
    """
    bare = _bare(text)
    name = re.findall(r"(?<![A-Za-z\\])[A-Za-z]+", bare.partition("=")[0]) if "=" in bare else []
    return bare if bare and not any(map(is_word, name)) and is_mathematics(bare) else None
