"""Tool calls in tags with names as attributes, as in MiniMax M2; DeepSeek V3.2 has other names of tags.

`<minimax:tool_call><invoke name="..."><parameter name="...">value</parameter></invoke></minimax:tool_call>`.
"""

from collections.abc import Collection

from jaxrlhf.conversations.tool_calls.written import Tag, Written, WrittenCall, after_last, elements, in_blocks

SIGNS = OPENINGS = ("<minimax:tool_call>",)


def find(text: str, tag: Tag, names: Collection[str]) -> Written:
    """Find the calls of a reply."""
    return invocations(text, "<minimax:tool_call>", "</minimax:tool_call>", "", tag)


def invocations(text: str, opening: str, closing: str, prefix: str, tag: Tag) -> Written:
    """Find the calls between an opening and a closing tag.

    Args:
      prefix: Prefix of the names of the inner tags.
    """

    def read(body: str) -> list[WrittenCall | str]:
        left, invokes = elements(body, f'<{prefix}invoke name="', f"</{prefix}invoke>")
        calls = [_call(invoke, prefix) for invoke in invokes]
        if left.strip() or not invokes:
            calls.append(f'a call is <{prefix}invoke name="...">, parameters, </{prefix}invoke>')
        return calls

    tags = tag(opening), tag(closing)
    return in_blocks(text, read, tags, end=after_last(f"</{prefix}invoke>", tags[0]))


def _call(invoke: str, prefix: str) -> WrittenCall | str:
    name, body = _named(invoke)
    left, parameters = elements(body, f'<{prefix}parameter name="', f"</{prefix}parameter>")
    pairs = [_named(parameter) for parameter in parameters]
    if left.strip() or None in (name, *(key for key, _ in pairs)):
        return f'a call contains only parameters, each with name="...", got {(left.strip() or invoke)[:80]!r}'
    return WrittenCall(name, {key: value.removeprefix("\n").removesuffix("\n") for key, value in pairs}, typed=False)


def _named(element: str) -> tuple[str | None, str]:
    """Split the text after `name="` into name and body; the name is None if the name or the tag has no end."""
    name, quoted, rest = element.partition('"')
    _, ended, body = rest.partition(">")
    return (name if quoted and ended else None), body
