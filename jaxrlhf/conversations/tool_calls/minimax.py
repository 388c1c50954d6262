"""Tags with names as attributes, as of MiniMax M2; DeepSeek V3.2 has them in tags of its own.

`<minimax:tool_call><invoke name="..."><parameter name="...">value</parameter></invoke></minimax:tool_call>`.
"""

import re

from jaxrlhf.conversations.tool_calls.written import Tag, Written, WrittenCall, blocks, unclosed

SIGNS = ("<minimax:tool_call>",)


def find(text: str, tag: Tag) -> Written:
    """Calls of a reply."""
    return invocations(text, "<minimax:tool_call>", "</minimax:tool_call>", "", tag)


def invocations(text: str, opening: str, closing: str, prefix: str, tag: Tag) -> Written:
    """Calls between an opening and a closing tag.

    Args:
      prefix: Beginning of the names of the tags within.
    """
    content, found = blocks(text, tag(opening), tag(closing))
    start, end = re.escape(f"<{prefix}"), re.escape(f"</{prefix}")
    invoke = re.compile(rf'{start}invoke name="([^"]*)"[^>]*>(.*?){end}invoke>', re.DOTALL)
    parameter = re.compile(rf'{start}parameter name="([^"]*)"([^>]*)>\n?(.*?)\n?{end}parameter>', re.DOTALL)
    written = Written(content)
    for body, closed in found:
        if not closed:
            written.calls.append(unclosed(closing))
            continue
        calls = [_call(match, parameter) for match in invoke.finditer(body)]
        left = invoke.sub("", body).strip()
        problem = f'a call is <{prefix}invoke name="...">, parameters, </{prefix}invoke>'
        written.calls += [*calls, *([problem] if left or not calls else [])]
    return written


def _call(invoke: re.Match[str], parameter: re.Pattern[str]) -> WrittenCall | str:
    left = parameter.sub("", invoke[2]).strip()
    if left:
        return f'a call holds parameters alone, each with name="...", got {left[:80]!r}'
    return WrittenCall(invoke[1], {found[1]: found[3] for found in parameter.finditer(invoke[2])}, typed=False)
