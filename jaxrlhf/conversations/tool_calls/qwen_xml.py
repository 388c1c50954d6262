"""Functions and parameters in tags, as of Qwen3-Coder, Qwen3.5 and Nemotron 3.

`<tool_call><function=name><parameter=key>value</parameter></function></tool_call>`, with line breaks around values.
"""

import re

from jaxrlhf.conversations.tool_calls.written import Tag, Written, WrittenCall, blocks, unclosed

SIGNS = ("<function=",)
_FUNCTION = re.compile(r"<function=([^>\n]*)>(.*)</function>", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\n]*)>\n?(.*?)\n?</parameter>", re.DOTALL)


def find(text: str, tag: Tag) -> Written:
    """Calls of a reply."""
    closing = tag("</tool_call>")
    content, found = blocks(text, tag("<tool_call>"), closing)
    return Written(content, [_call(body) if closed else unclosed(closing) for body, closed in found])


def _call(body: str) -> WrittenCall | str:
    function = _FUNCTION.fullmatch(body.strip())
    if function is None:
        return "a call is <function=name>...</function>"
    left = _PARAMETER.sub("", function[2]).strip()
    if left:
        return f"a call holds parameters alone, each <parameter=key>value</parameter>, got {left[:80]!r}"
    return WrittenCall(
        function[1].strip(), {key.strip(): value for key, value in _PARAMETER.findall(function[2])}, False
    )
