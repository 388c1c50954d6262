"""Tool calls as a policy wrote them, before anything says that they can be made."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
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
    """

    name: Any
    arguments: Any
    typed: bool = True


@dataclass
class Written:
    """Parts of a reply.

    Attributes:
      content: Text beside reasoning and calls.
      calls: In order; a text says what is wrong with one that could not be read.
    """

    content: str
    calls: list[WrittenCall | str] = field(default_factory=list)
    reasoning: str = ""


def in_blocks(text: str, read: Callable[[str], list[WrittenCall | str]], *tags: tuple[str, str]) -> Written:
    """Text outside of pairs of tags, and the calls that are read of what is inside of each pair.

    Args:
      tags: Opening and closing tag of each kind of pair.
    """
    written = Written(text)
    for opening, closing in tags:
        written.content, *inside = written.content.split(opening)
        for part in inside:
            body, closed, after = part.partition(closing)
            written.calls += read(body) if closed else [unclosed(closing)]
            written.content += after
    return written


def elements(text: str, opening: str, closing: str) -> tuple[str, list[str]]:
    """Text outside of elements, and what each has between its opening and the next closing.

    One pass, whatever is missing: a policy may go round in circles in an opening.
    """
    outside, inside, at = "", list[str](), 0
    while (begin := text.find(opening, at)) >= 0 and (end := text.find(closing, begin + len(opening))) >= 0:
        outside += text[at:begin]
        inside.append(text[begin + len(opening) : end])
        at = end + len(closing)
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
