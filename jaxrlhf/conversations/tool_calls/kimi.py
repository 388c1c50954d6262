"""Calls of Kimi K2, between tokens of its own: an id such as `functions.add:0`, then JSON.

`<|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>{...}<|tool_call_end|>`, in a section
with a tag at each end.
"""

from jaxrlhf.conversations.tool_calls.written import Tag, Written, WrittenCall, blocks, json_arguments, unclosed

SIGNS = ("<|tool_calls_section_begin|>",)


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
    if not separated:
        return "a call is an id and arguments with <|tool_call_argument_begin|> between them"
    name = name.strip().removeprefix("functions.")
    before, colon, number = name.rpartition(":")
    return json_arguments(before if colon and number.isdecimal() else name, arguments)
