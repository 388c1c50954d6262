"""Tool calls with functions and parameters in tags, as in Qwen3-Coder, Qwen3.5 and Nemotron 3.

`<tool_call><function=name><parameter=key>value</parameter></function></tool_call>`, with line breaks around values.
"""

import re
from collections.abc import Collection

from jaxrlhf.conversations.tool_calls.written import Tag, Written, WrittenCall, after_last, elements, in_blocks

SIGNS = ("<function=",)
OPENINGS = ("<tool_call>",)
_FUNCTION = re.compile(r"<function=([^>\n]*)>(.*)</function>", re.DOTALL)


def find(text: str, tag: Tag, names: Collection[str]) -> Written:
    """Find the calls of a reply."""
    tags = tag("<tool_call>"), tag("</tool_call>")
    return in_blocks(text, lambda body: [_call(body)], tags, end=after_last("</function>", tags[0]))


def _call(body: str) -> WrittenCall | str:
    function = _FUNCTION.fullmatch(body.strip())
    if function is None:
        return "a call is <function=name>...</function>"
    left, parameters = elements(function[2], "<parameter=", "</parameter>")
    pairs = [parameter.partition(">") for parameter in parameters]
    if left.strip() or not all(ended and "\n" not in key for key, ended, _ in pairs):
        given = (left.strip() or function[2])[:80]
        return f"a call contains only parameters, each <parameter=key>value</parameter>, got {given!r}"
    arguments = {key.strip(): value.removeprefix("\n").removesuffix("\n") for key, _, value in pairs}
    return WrittenCall(function[1].strip(), arguments, False)
