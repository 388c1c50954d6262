"""Calls of Kimi K2, between tokens of its own: an id such as `functions.add:0`, then JSON.

`<|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>{...}<|tool_call_end|>`, in a section
with a tag at each end.
"""

import re

from jaxrlhf.conversations.tool_calls.written import Tag, Written, WrittenCall, blocks, json_arguments, unclosed

SIGNS = ("<|tool_calls_section_begin|>",)
_ID = re.compile(r"\s*(?:functions\.)?(.*?)(?::\d+)?\s*", re.DOTALL)


def find(text: str, tag: Tag) -> Written:
    """Calls of a reply."""
    for part in ("begin", "end"):
        text = text.replace(tag(f"<|tool_calls_section_{part}|>"), "")
    closing = tag("<|tool_call_end|>")
    content, found = blocks(text, tag("<|tool_call_begin|>"), closing)
    separator = tag("<|tool_call_argument_begin|>")
    return Written(content, [_call(body, separator) if closed else unclosed(closing) for body, closed in found])


def _call(body: str, separator: str) -> WrittenCall | str:
    name, separated, arguments = body.partition(separator)
    found = _ID.fullmatch(name)
    if not separated or found is None:
        return "a call is an id and arguments with <|tool_call_argument_begin|> between them"
    return json_arguments(found[1], arguments)
