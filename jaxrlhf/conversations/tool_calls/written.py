"""Tool calls as a policy wrote them, before they are checked against the tools."""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

MARK = "\ue000"
"""Character before each added token in a reply's text; letters that only spell the token have no mark."""

Tag = Callable[[str], str]
"""Function from a tag, such as `<tool_call>`, to its form in a reply's text: marked if the tag is one token."""


class WrittenCall(NamedTuple):
    """Call with a name and arguments that could be parsed, but are not checked yet.

    Attributes:
      name: Name of a tool; None if the arguments are positional text.
      arguments: Values by name, or positional text.
      typed: True if the values have types; otherwise they are text that the schema interprets.
      call_id: Id that was sampled with the call; empty if the form has none.
    """

    name: Any
    arguments: Any
    typed: bool = True
    call_id: str = ""


class CallBlock(NamedTuple):
    """Part of a reply that is written as calls.

    Attributes:
      text: Text of the part, tags included.
      calls: Calls in order; a text is the error of a call that could not be parsed.
    """

    text: str
    calls: list[WrittenCall | str]


@dataclass
class Written:
    """Parts of a reply, in order: texts outside of reasoning and calls, and blocks of calls."""

    parts: list[str | CallBlock]
    reasoning: str = ""

    @property
    def calls(self) -> list[WrittenCall | str]:
        """Calls of all blocks."""
        return [call for part in self.parts if isinstance(part, CallBlock) for call in part.calls]


JSON_ERRORS = (ValueError, RecursionError)
"""Exceptions of `json` for texts that are not JSON, or too deep."""

_DECODER = json.JSONDecoder(strict=False)
_SPACE = re.compile(r"\s*+")

End = Callable[[str, int, str], int]
"""Function from a text, the index after an opening tag, and the closing tag, to the index of the closing tag that ends
the call, even if values spell closing tags; -1 if the function cannot find the end."""

_MOST_FAILURES = 8
"""Maximum number of failed searches for the end of a call, since a policy may repeat itself endlessly."""


def in_blocks(
    text: str, read: Callable[[str], list[WrittenCall | str]], *tags: tuple[str, str], end: End | None = None
) -> Written:
    """Split a text into the text outside of pairs of tags and the calls inside of each pair.

    Args:
      read: Parser of the text between the tags of a pair.
      tags: Opening and closing tag of each kind of pair.
      end: Function that finds the end of a well-formed pair; any other pair ends at its first closing tag.
    """
    written = Written([])
    closings = dict(tags)
    openings = re.compile("|".join(re.escape(opening) for opening in closings))
    at, failures = 0, 0
    while (opened := openings.search(text, at)) is not None:
        written.parts.append(text[at : opened.start()])
        begin, closing = opened.end(), closings[opened[0]]
        calls: list[WrittenCall | str] = []
        stop = -1
        if end is not None and failures < _MOST_FAILURES:
            stop = end(text, begin, closing)
            calls = read(text[begin:stop]) if stop >= 0 else []
            failures += not calls or any(isinstance(call, str) for call in calls)
        if not calls or any(isinstance(call, str) for call in calls):
            following = openings.search(text, begin)
            limit = len(text) if following is None else following.start()
            stop = text.find(closing, begin, limit)
            calls = read(text[begin:stop]) if stop >= 0 else [unclosed(closing)]
            at = stop + len(closing) if stop >= 0 else limit
        else:
            at = stop + len(closing)
        written.parts.append(CallBlock(text[opened.start() : at], calls))
    written.parts.append(text[at:])
    return written


def json_value(text: str, at: int) -> tuple[Any, int]:
    """Parse the JSON value at an index of the text, after whitespace; return the value and the index after it.

    Raises:
      ValueError, RecursionError: The text is not JSON, or too deep.
    """
    return _DECODER.raw_decode(text, past_space(text, at))


def after_json(text: str, begin: int, closing: str) -> int:
    """Find the end of a pair of tags with JSON content, perhaps in a block of Markdown: the tag after the value."""
    try:
        _, at = json_value(text, begin)
    except JSON_ERRORS:
        return -1
    at = past_space(text, at)
    at = past_space(text, at + 3) if text.startswith("```", at) else at
    return at if text.startswith(closing, at) else -1


def after_arguments(separator: str) -> End:
    """Return an `End` for pairs of tags with a name, a separator, and JSON, perhaps in a block of Markdown."""

    def end(text: str, begin: int, closing: str) -> int:
        named = text.find(separator, begin)
        first = text.find("{", max(named, begin))
        if named < 0 or first < 0 or closing in text[begin:first]:
            return -1
        return after_json(text, first, closing)

    return end


def after_last(tag: str, opening: str, needed: str = "") -> End:
    """Return an `End` for pairs of tags whose content ends with a tag: the first closing tag right after that tag.

    If the next call opens right after an earlier closing tag, the content is broken, and the function finds no end.

    Args:
      opening: Opening tag of a pair.
      needed: Text that precedes the first closing tag in all contents with that tag; saves a search in others.
    """

    def end(text: str, begin: int, closing: str) -> int:
        first = text.find(closing, begin)
        if needed and text.find(needed, begin, max(first, begin)) < 0:
            return -1
        found = re.compile(re.escape(tag) + r"\s*+(?=" + re.escape(closing) + ")").search(text, begin)
        if found is None:
            return -1
        following = re.compile(re.escape(closing) + r"\s*+" + re.escape(opening)).search(text, begin, found.end())
        return found.end() if following is None else -1

    return end


def may_begin(text: str, tags: Sequence[str], at: int = 0) -> int:
    """Return the index, at least `at`, from which the text may be the start of one of the tags; else its length."""
    longest = max(map(len, tags), default=0)
    for place in range(max(at, len(text) - longest + 1), len(text)):
        if any(tag.startswith(text[place:]) for tag in tags):
            return place
    return len(text)


def past_space(text: str, at: int) -> int:
    """Return the index of the first character from `at` on that is no whitespace."""
    found = _SPACE.match(text, at)
    return at if found is None else found.end()


def elements(text: str, opening: str, closing: str) -> tuple[str, list[str]]:
    """Return the text outside of elements, and the text between the opening and closing tag of each element.

    An element ends at a closing tag that is followed by another opening tag or the end of the text, because a value may
    spell closing tags. The text is scanned once even if tags are missing, because a policy may repeat an opening tag
    endlessly.
    """
    ends = re.compile(re.escape(closing) + r"(?=\s*+(?:" + re.escape(opening) + r"|\Z))")
    outside, inside, at = "", list[str](), 0
    while (begin := text.find(opening, at)) >= 0 and (end := ends.search(text, begin + len(opening))) is not None:
        value = text[begin + len(opening) : end.start()]
        if opening in value.partition(closing)[2]:  # two elements with text between them
            break
        outside += text[at:begin]
        inside.append(value)
        at = end.end()
    return outside + text[at:], inside


def json_call(text: str) -> list[WrittenCall | str]:
    """Parse the calls of a JSON object with a name and arguments, or of a list of such objects."""
    try:
        value = json.loads(text, strict=False)
    except JSON_ERRORS as error:
        return [f"a call is not JSON: {error}"]
    return calls_of(value, ("arguments", "parameters"))


def calls_of(value: Any, arguments: Sequence[str]) -> list[WrittenCall | str]:
    """Return the calls of an object, or of a list of objects, with a name and arguments under one of several keys."""
    found: list[WrittenCall | str] = []
    for item in value if isinstance(value, list) else [value]:
        if not isinstance(item, dict) or "name" not in item:
            found.append('a call is a JSON object with "name" and "arguments"')
            continue
        found.append(WrittenCall(item["name"], next((item[key] for key in arguments if key in item), {})))
    return found


def json_arguments(name: str, text: str) -> WrittenCall | str:
    """Return the call of a name with arguments in JSON, or an error text."""
    try:
        return WrittenCall(name.strip(), json.loads(text, strict=False))
    except JSON_ERRORS as error:
        return f"the arguments of a call are not JSON: {error}"


def unclosed(closing: str) -> str:
    """Return the error text of a call without an end."""
    return f"a call has no {closing.replace(MARK, '')} at its end"
