"""Messages in channels, as of gpt-oss (harmony): reasoning in `analysis`, calls in `commentary` to a function.

`<|channel|>commentary to=functions.add <|constrain|>json<|message|>{...}`; the receiver may stand before the channel.
"""

import re

from jaxrlhf.conversations.tool_calls.written import MARK, Tag, Written, json_arguments

SIGNS = ("<|channel|>",)
_RECEIVER = re.compile(r"to=(?:functions\.)?([\w.-]+)")


def find(text: str, tag: Tag) -> Written:
    """Calls of a reply, its reasoning and its content."""
    written = Written("")
    for part in text.split(tag("<|end|>")):
        header, message, body = part.partition(tag("<|message|>"))
        if not message:
            written.content += header.replace(tag("<|start|>") + "assistant", "")
            continue
        receiver = _RECEIVER.search(header)
        if receiver is not None:
            written.calls.append(json_arguments(receiver[1], body.removesuffix(tag("<|call|>"))))
        elif "analysis" in header.replace(MARK, ""):
            written.reasoning += body
        else:
            written.content += body
    return written
