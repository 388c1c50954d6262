"""Tool calls as JSON in tags, as in Hermes, Qwen2.5, Qwen3 and SmolLM3.

`<tool_call>{"name": ..., "arguments": ...}</tool_call>` is a call. Phi-4-mini writes a list of such objects in
`<|tool_call|>`.
"""

import json
from collections.abc import Collection, Sequence
from typing import Any

from jaxrlhf.conversations.tool_calls.written import Tag, Written, after_json, in_blocks, json_call

SIGNS = OPENINGS = ("<tool_call>", "<|tool_call|>")
_TAGS = (("<tool_call>", "</tool_call>"), ("<|tool_call|>", "<|/tool_call|>"))


def find(text: str, tag: Tag, names: Collection[str]) -> Written:
    """Find the calls of a reply."""
    return in_blocks(text, json_call, *((tag(opening), tag(closing)) for opening, closing in _TAGS), end=after_json)


def write(calls: Sequence[tuple[str, Any]]) -> str:
    """Write calls as text."""
    given = (json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False) for name, arguments in calls)
    return "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in given)
