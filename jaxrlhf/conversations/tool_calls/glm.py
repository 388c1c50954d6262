"""Names, keys and values in tags, as of GLM-4.5 and later.

`<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>`, with line breaks between them.
"""

import re

from jaxrlhf.conversations.tool_calls.written import Tag, Written, WrittenCall, blocks, unclosed

SIGNS = ("<arg_key>",)


def find(text: str, tag: Tag) -> Written:
    """Calls of a reply."""
    tags = [re.escape(tag(name)) for name in ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")]
    argument = re.compile(r"{}(.*?){}\s*{}(.*?){}".format(*tags), re.DOTALL)
    closing = tag("</tool_call>")
    content, found = blocks(text, tag("<tool_call>"), closing)
    return Written(content, [_call(body, argument) if closed else unclosed(closing) for body, closed in found])


def _call(body: str, argument: re.Pattern[str]) -> WrittenCall | str:
    name = argument.sub("", body).strip()
    if "<arg_" in name or "</arg_" in name:
        return "a call is a name, then pairs of <arg_key>...</arg_key> and <arg_value>...</arg_value>"
    return WrittenCall(name, {key.strip(): value for key, value in argument.findall(body)}, False)
