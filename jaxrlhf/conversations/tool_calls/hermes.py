"""JSON in tags, as of Hermes, Qwen2.5, Qwen3 and SmolLM3.

`<tool_call>{"name": ..., "arguments": ...}</tool_call>` is a call. Phi-4-mini has
a list of such objects in `<|tool_call|>`.
"""

from jaxrlhf.conversations.tool_calls.written import Tag, Written, blocks, json_call, unclosed

SIGNS = ("<tool_call>", "<|tool_call|>")
_TAGS = (("<tool_call>", "</tool_call>"), ("<|tool_call|>", "<|/tool_call|>"))


def find(text: str, tag: Tag) -> Written:
    """Calls of a reply."""
    written = Written(text)
    for opening, closing in _TAGS:
        written.content, found = blocks(written.content, tag(opening), tag(closing))
        for body, closed in found:
            written.calls += json_call(body) if closed else [unclosed(closing)]
    return written
