"""Names, keys and values in tags, as of GLM-4.5 and later.

`<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>`, with line breaks between them.
"""

from jaxrlhf.conversations.tool_calls.written import Tag, Written, WrittenCall, in_blocks

SIGNS = ("<arg_key>",)
_PROBLEM = "a call is a name, then pairs of <arg_key>...</arg_key> and <arg_value>...</arg_value>"


def find(text: str, tag: Tag) -> Written:
    """Calls of a reply."""
    tags = [tag(name) for name in ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")]
    return in_blocks(text, lambda body: [_call(body, *tags)], (tag("<tool_call>"), tag("</tool_call>")))


def _call(body: str, key_begin: str, key_end: str, value_begin: str, value_end: str) -> WrittenCall | str:
    """Call of a name and pairs; each tag is looked for once, since a policy may go round in circles in them."""
    name, *pairs = body.split(key_begin)
    arguments = {}
    for pair in pairs:
        key, _, rest = pair.partition(key_end)
        between, _, rest = rest.partition(value_begin)
        value, ended, after = rest.partition(value_end)
        if not ended or between.strip() or after.strip():
            return _PROBLEM
        arguments[key.strip()] = value
    if "<arg_" in name or "</arg_" in name:
        return _PROBLEM
    return WrittenCall(name.strip(), arguments, False)
