"""Tool calls of the embedded tokenizer, in the form of GSM8K's calculator marks: `<<47*86>>`.

With several tools the name comes first, as in `<<add: 47, 86>>`. Arguments are in the order of the tool's parameters,
separated by commas. The last argument takes the rest.
"""

from collections.abc import Collection

from jaxrlhf.conversations.tool_calls.written import Tag, Written, WrittenCall, in_blocks

SIGNS = ("'<<'",)
OPENINGS = ("<<",)


def find(text: str, tag: Tag, names: Collection[str]) -> Written:
    """Find the calls of a reply."""
    return in_blocks(text, lambda body: [WrittenCall(None, body, typed=False)], ("<<", ">>"))
