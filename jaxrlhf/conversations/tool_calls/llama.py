"""Replies that are JSON calls as a whole, as of Llama 3: `{"name": ..., "parameters": {...}}`.

Several stand behind each other with `;` between them; `<|python_tag|>` may stand before them.
"""

import json

from jaxrlhf.conversations.tool_calls.written import Tag, Written, WrittenCall, calls_of

SIGNS = ("<|python_tag|>", "<|start_header_id|>")


def find(text: str, tag: Tag) -> Written:
    """Calls of a reply."""
    before, python, body = text.rpartition(tag("<|python_tag|>"))
    body = body.strip()
    if not python and not body.startswith('{"name"') and not (body.startswith("{") and '"parameters"' in body):
        return Written(text)
    return Written(before, _objects(body))


def _objects(text: str) -> list[WrittenCall | str]:
    """Calls of JSON objects one after another."""
    found: list[WrittenCall | str] = []
    while text:
        try:
            value, end = json.JSONDecoder(strict=False).raw_decode(text)
        except (ValueError, RecursionError) as error:
            return [*found, f"a call is not JSON: {error}"]
        found += calls_of(value, ("parameters", "arguments"))
        text = text[end:].lstrip().removeprefix(";").lstrip()
    return found or ["a call is a JSON object"]
