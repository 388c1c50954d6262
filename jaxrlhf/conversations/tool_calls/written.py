"""Tool calls as a policy wrote them, before anything says that they can be made."""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

MARK = "\ue000"
"""Character before each added token in a reply's text, so that letters which spell one are told apart."""

Tag = Callable[[str], str]
"""Function from a tag, such as `<tool_call>`, to how a reply's text shows it: marked if it is one token."""


class WrittenCall(NamedTuple):
    """Call whose name and arguments could be read.

    Attributes:
      name: Name of a tool, hopefully.
      arguments: By name, hopefully.
      typed: Values have types; otherwise they are text, for the schema to say what it means.
      call_id: Id of the call that was sampled with the call; empty where the form has none.
    """

    name: Any
    arguments: Any
    typed: bool = True
    call_id: str = ""


class CallBlock(NamedTuple):
    """Part of a reply that is written as calls.

    Attributes:
      text: The part as it was written, tags included.
      calls: Calls in their order; a text says what is wrong with one that could not be read.
    """

    text: str
    calls: list[WrittenCall | str]


@dataclass
class Written:
    """Parts of a reply, in order: texts beside reasoning and calls, and blocks of calls."""

    parts: list[str | CallBlock]
    reasoning: str = ""

    @property
    def calls(self) -> list[WrittenCall | str]:
        """Calls of all blocks."""
        return [call for part in self.parts if isinstance(part, CallBlock) for call in part.calls]


_SPACE = re.compile(r"\s*+")

End = Callable[[str, int, str], int]
"""Function from a text, the place behind an opening tag, and the closing tag, to the place of the closing tag that the
form itself says to be the end, whatever its values spell; -1 if it does not say."""

_MOST_IN_VAIN = 8
"""Ends that are looked for in vain, at most: a policy may go round in circles."""


def in_blocks(
    text: str, read: Callable[[str], list[WrittenCall | str]], *tags: tuple[str, str], end: End | None = None
) -> Written:
    """Text outside of pairs of tags, and the calls that are read of what is inside of each pair.

    Args:
      tags: Opening and closing tag of each kind of pair.
      end: Where a pair ends that is written well; one that is not ends with its first closing tag.
    """
    written = Written([])
    closings = dict(tags)
    openings = re.compile("|".join(re.escape(opening) for opening in closings))
    at, vain = 0, 0
    while (opened := openings.search(text, at)) is not None:
        written.parts.append(text[at : opened.start()])
        begin, closing = opened.end(), closings[opened[0]]
        calls: list[WrittenCall | str] = []
        stop = -1
        if end is not None and vain < _MOST_IN_VAIN:
            stop = end(text, begin, closing)
            calls = read(text[begin:stop]) if stop >= 0 else []
            vain += not calls or any(isinstance(call, str) for call in calls)
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


def after_json(text: str, begin: int, closing: str) -> int:
    """End of a pair of tags whose content is JSON: the closing tag behind the value."""
    at = past_space(text, begin)
    try:
        _, at = json.JSONDecoder(strict=False).raw_decode(text, at)
    except (ValueError, RecursionError):
        return -1
    at = past_space(text, at)
    return at if text.startswith(closing, at) else -1


def after_arguments(separator: str) -> End:
    """End of a pair of tags whose content is a name, a separator, and JSON, perhaps in a block of Markdown."""

    def end(text: str, begin: int, closing: str) -> int:
        named = text.find(separator, begin)
        first = text.find("{", max(named, begin))
        if named < 0 or first < 0 or closing in text[begin:first]:
            return -1
        try:
            _, at = json.JSONDecoder(strict=False).raw_decode(text, first)
        except (ValueError, RecursionError):
            return -1
        at = past_space(text, at)
        at = past_space(text, at + 3) if text.startswith("```", at) else at
        return at if text.startswith(closing, at) else -1

    return end


def after_last(tag: str, needed: str = "") -> End:
    """End of a pair of tags whose content ends with a tag: the first closing tag behind one.

    Args:
      needed: Text that stands before the first closing tag wherever the content has that tag.
    """

    def end(text: str, begin: int, closing: str) -> int:
        first = text.find(closing, begin)
        if needed and text.find(needed, begin, max(first, begin)) < 0:
            return -1
        found = re.compile(re.escape(tag) + r"\s*+(?=" + re.escape(closing) + ")").search(text, begin)
        return -1 if found is None else found.end()

    return end


def may_begin(text: str, tags: Sequence[str], at: int = 0) -> int:
    """The place from which on, behind another, a text may turn out to be one of the tags; its end if there is none."""
    longest = max(map(len, tags), default=0)
    for place in range(max(at, len(text) - longest + 1), len(text)):
        if any(tag.startswith(text[place:]) for tag in tags):
            return place
    return len(text)


def past_space(text: str, at: int) -> int:
    """The place of the first character from a place on that is no space."""
    found = _SPACE.match(text, at)
    return at if found is None else found.end()


def elements(text: str, opening: str, closing: str) -> tuple[str, list[str]]:
    """Text outside of elements, and what each has between its opening and its closing.

    An element ends with the closing that another opening or the end of the text follows: a value may spell closings.
    One pass, whatever is missing: a policy may go round in circles in an opening.
    """
    ends = re.compile(re.escape(closing) + r"(?=\s*+(?:" + re.escape(opening) + r"|\Z))")
    outside, inside, at = "", list[str](), 0
    while (begin := text.find(opening, at)) >= 0 and (end := ends.search(text, begin + len(opening))) is not None:
        value = text[begin + len(opening) : end.start()]
        if opening in value.partition(closing)[2]:  # two elements, and words between them
            break
        outside += text[at:begin]
        inside.append(value)
        at = end.end()
    return outside + text[at:], inside


def json_call(text: str) -> list[WrittenCall | str]:
    """Calls of a JSON object with a name and arguments, or of a list of such objects."""
    try:
        value = json.loads(text, strict=False)
    except (ValueError, RecursionError) as error:
        return [f"a call is not JSON: {error}"]
    return calls_of(value, ("arguments", "parameters"))


def calls_of(value: Any, arguments: Sequence[str]) -> list[WrittenCall | str]:
    """Calls of an object, or of a list of objects, with a name and arguments under one of several keys."""
    found: list[WrittenCall | str] = []
    for item in value if isinstance(value, list) else [value]:
        if not isinstance(item, dict) or "name" not in item:
            found.append('a call is a JSON object with "name" and "arguments"')
            continue
        found.append(WrittenCall(item["name"], next((item[key] for key in arguments if key in item), {})))
    return found


def json_arguments(name: str, text: str) -> WrittenCall | str:
    """Call by a name, with arguments that are JSON."""
    try:
        return WrittenCall(name.strip(), json.loads(text, strict=False))
    except (ValueError, RecursionError) as error:
        return f"the arguments of a call are not JSON: {error}"


def unclosed(closing: str) -> str:
    """Problem of a call that does not end."""
    return f"a call has no {closing.replace(MARK, '')} at its end"
