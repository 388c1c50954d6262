"""Tool calls with keys and values in tags, as in GLM-4.5 and later.

`<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>`, with line breaks between them.
"""

from collections.abc import Collection

from jaxrlhf.conversations.tool_calls.written import Tag, Written, WrittenCall, after_last, elements, in_blocks

SIGNS = ("<arg_key>",)
OPENINGS = ("<tool_call>",)
_PROBLEM = "a call is a name, then pairs of <arg_key>...</arg_key> and <arg_value>...</arg_value>"


def find(text: str, tag: Tag, names: Collection[str]) -> Written:
    """Find the calls of a reply."""
    tags = [tag(name) for name in ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")]
    opening, closing = tag("<tool_call>"), tag("</tool_call>")
    end = after_last(tags[3], opening, needed=tags[0])
    return in_blocks(text, lambda body: [_call(body, *tags)], (opening, closing), end=end)


def _call(body: str, key_begin: str, key_end: str, value_begin: str, value_end: str) -> WrittenCall | str:
    """Parse a call of a name and pairs, in one pass, because a policy may repeat tags endlessly."""
    name, *_ = body.split(key_begin, 1)
    left, pairs = elements(body[len(name) :], key_begin, value_end)
    arguments = {}
    for pair in pairs:
        key, _, rest = pair.partition(key_end)
        between, opened, value = rest.partition(value_begin)
        if not opened or between.strip() or key_begin in key:
            return _PROBLEM
        arguments[key.strip()] = value
    if left.strip() or "<arg_" in name or "</arg_" in name:
        return _PROBLEM
    return WrittenCall(name.strip(), arguments, False)
