"""Tool calls as JSON that is the whole reply, as in Llama 3: `{"name": ..., "parameters": {...}}`.

Several calls are separated by `;`, and `<|python_tag|>` may precede them. Without that tag an object is a call only if
it has a name and parameters, or the name of a tool, because an answer may be JSON too.
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
    past_space,
)

SIGNS = ("<|python_tag|>", "<|start_header_id|>")
OPENINGS, BEGINNINGS = ("<|python_tag|>",), ("{",)
_KEYS = ("parameters", "arguments")
_OPENED = re.compile(r'\{\s*+"name"\s*+:\s*+"([^"]*+)"\s*+,\s*+"(?:parameters|arguments)"')


def find(text: str, tag: Tag, names: Collection[str]) -> Written:
    """Find the calls of a reply."""
    before, python, body = text.rpartition(tag("<|python_tag|>"))
    if python:
        calls, _ = _objects(body, 0)
        return Written([before, CallBlock(python + body, calls or ["a call is a JSON object"])])
    begin = past_space(text, 0)
    calls, end = _objects(text, begin, names)
    opened = _OPENED.match(text, end)
    if opened is not None and opened[1] in names:  # a call in invalid JSON
        calls, end = [*calls, *_objects(text, end)[0]], len(text)
    return Written([CallBlock(text[:end], calls), text[end:].lstrip()] if calls else [text])


def _objects(text: str, at: int, names: Collection[str] | None = None) -> tuple[list[WrittenCall | str], int]:
    """Return the calls of consecutive JSON objects, and the index after the last object.

    Args:
      names: Names of tools; an object without parameters is a call only if it has one. None: every object is a call.
    """
    found: list[WrittenCall | str] = []
    end = at
    at = past_space(text, at)
    while at < len(text):
        try:
            value, after = json_value(text, at)
        except JSON_ERRORS as error:
            return ([*found, f"a call is not JSON: {error}"] if names is None else found), end
        following = past_space(text, after)
        if names is not None and not _is_call(value, names, alone=following == len(text)):
            return found, end
        found += calls_of(value, _KEYS)
        end, at = after, following
        if text.startswith(";", at):
            at = past_space(text, at + 1)
    return found, end


def _is_call(value: Any, names: Collection[str], *, alone: bool) -> bool:
    """Return True if an object is a call, and not an answer in JSON or the beginning of prose.

    Args:
      alone: True if no text follows the object.
    """
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return False
    given = next((value[key] for key in _KEYS if key in value), None)
    if set(value) - {"name", "type", "id", *_KEYS}:
        return value["name"] in names and given is not None
    return isinstance(given, dict) or (value["name"] in names and (alone or given is not None))
