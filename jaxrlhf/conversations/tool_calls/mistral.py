"""Tool calls as JSON after `[TOOL_CALLS]`, as in Mistral: a list of objects with a name, arguments and an id.

Later models write each call as `[TOOL_CALLS]name[ARGS]{...}`, some with `[CALL_ID]` and an id before the arguments.
"""

import re
from collections.abc import Collection
from typing import Any

from jaxrlhf.conversations.tool_calls.written import (
    JSON_ERRORS,
    CallBlock,
    Tag,
    Written,
    WrittenCall,
    calls_of,
    json_value,
)

SIGNS = OPENINGS = ("[TOOL_CALLS]",)


def _usable(call_id: Any) -> str:
    """Return the id of a call if Mistral's templates take the id, else an empty text; they refuse other lengths."""
    return call_id if isinstance(call_id, str) and re.fullmatch("[A-Za-z0-9]{9}", call_id) else ""


def _listed(value: Any) -> list[WrittenCall | str]:
    """Return the calls of a JSON list of objects, each with its id if it has one."""
    items = value if isinstance(value, list) else [value]
    found = [each for item in items for each in calls_of(item, ("arguments", "parameters"))]
    return [
        each if isinstance(each, str) else each._replace(call_id=_usable(item.get("id")))
        for item, each in zip(items, found, strict=True)
    ]


def find(text: str, tag: Tag, names: Collection[str]) -> Written:
    """Find the calls of a reply; text after the JSON of a call is content."""
    opening, args = tag("[TOOL_CALLS]"), tag("[ARGS]")
    written, at = Written([]), 0
    while (opened := text.find(opening, at)) >= 0:
        written.parts.append(text[at:opened].lstrip() if at else text[:opened])
        begin, following = opened + len(opening), text.find(opening, opened + len(opening))
        limit = following if following >= 0 else len(text)
        named = text.find(args, begin, limit)
        try:
            value, at = json_value(text, named + len(args) if named >= 0 else begin)
        except JSON_ERRORS as error:
            at = limit
            calls: list[WrittenCall | str] = [f"a call is not JSON: {error}"]
        else:
            name, _, call_id = text[begin : max(named, begin)].partition(tag("[CALL_ID]"))
            calls = (
                [WrittenCall(name.strip(), value, call_id=_usable(call_id.strip()))] if named >= 0 else _listed(value)
            )
        written.parts.append(CallBlock(text[opened:at], calls))
    written.parts.append(text[at:].lstrip() if at else text)
    return written
