"""Tool calls of Kimi K2, between special tokens: an id such as `functions.add:0`, then JSON.

`<|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>{...}<|tool_call_end|>`, in a section with a tag at each
end.
"""

from collections.abc import Collection

from jaxrlhf.conversations.tool_calls.written import (
    Tag,
    Written,
    WrittenCall,
    after_arguments,
    in_blocks,
    json_arguments,
)

SIGNS = ("<|tool_calls_section_begin|>",)
OPENINGS = (*SIGNS, "<|tool_calls_section_end|>", "<|tool_call_begin|>")


def find(text: str, tag: Tag, names: Collection[str]) -> Written:
    """Find the calls of a reply."""
    for part in ("begin", "end"):
        text = text.replace(tag(f"<|tool_calls_section_{part}|>"), "")
    separator = tag("<|tool_call_argument_begin|>")
    tags = tag("<|tool_call_begin|>"), tag("<|tool_call_end|>")
    return in_blocks(text, lambda body: [_call(body, separator)], tags, end=after_arguments(separator))


def _call(body: str, separator: str) -> WrittenCall | str:
    name, separated, arguments = body.partition(separator)
    if not separated:
        return "a call is an id and arguments with <|tool_call_argument_begin|> between them"
    call_id = name.strip()  # the template writes the id where other templates write a name
    name = call_id.removeprefix("functions.")
    before, colon, number = name.rpartition(":")
    call = json_arguments(before if colon and number.isdecimal() else name, arguments)
    return call if isinstance(call, str) else call._replace(call_id=call_id)
