"""Calls of the embedded tokenizer, in the form of GSM8K's calculator marks: `<<47*86>>`.

With several tools the name comes first, as in `<<add: 47, 86>>`. Arguments stand in the order of the tool's
parameters, with commas between them; the last one takes what is left.
"""

from collections.abc import Collection

from jaxrlhf.conversations.tool_calls.written import Tag, Written, WrittenCall, in_blocks

SIGNS = ("'<<'",)
OPENINGS = ("<<",)


def find(text: str, tag: Tag, names: Collection[str]) -> Written:
    """Calls of a reply."""
    return in_blocks(text, lambda body: [WrittenCall(None, body, typed=False)], ("<<", ">>"))
