"""JSON behind `[TOOL_CALLS]`, as of Mistral: a list of objects with a name, arguments and an id.

Later models write each call as `[TOOL_CALLS]name[ARGS]{...}`, some with `[CALL_ID]` and an id before the arguments.
"""

from jaxrlhf.conversations.tool_calls.written import Tag, Written, json_arguments, json_call

SIGNS = ("[TOOL_CALLS]",)


def find(text: str, tag: Tag) -> Written:
    """Calls of a reply."""
    content, *bodies = text.split(tag("[TOOL_CALLS]"))
    written = Written(content)
    for body in bodies:
        name, args, arguments = body.partition(tag("[ARGS]"))
        if args:
            written.calls.append(json_arguments(name.partition(tag("[CALL_ID]"))[0], arguments))
        else:
            written.calls += json_call(body)
    return written
