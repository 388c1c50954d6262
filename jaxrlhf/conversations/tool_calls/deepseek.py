"""Tool calls of DeepSeek, between special tokens.

V3 and R1 write `function<｜tool▁sep｜>name` and a block of JSON. V3.1 writes `name<｜tool▁sep｜>{...}`. In both forms a
call is in `<｜tool▁call▁begin｜>...<｜tool▁call▁end｜>`. V3.2 writes tags with names that begin with `｜DSML｜`.
"""

from collections.abc import Collection

from jaxrlhf.conversations.tool_calls.minimax import invocations
from jaxrlhf.conversations.tool_calls.written import (
    Tag,
    Written,
    WrittenCall,
    after_arguments,
    in_blocks,
    json_arguments,
)

SIGNS = ("｜tool▁calls▁begin｜", "｜DSML｜")
OPENINGS = (*("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜DSML｜function_calls>"),)


def find(text: str, tag: Tag, names: Collection[str]) -> Written:
    """Find the calls of a reply."""
    if "｜DSML｜" in text:
        return invocations(text, "<｜DSML｜function_calls>", "</｜DSML｜function_calls>", "｜DSML｜", tag)
    for part in ("calls▁begin", "calls▁end"):
        text = text.replace(tag(f"<｜tool▁{part}｜>"), "")
    separator = tag("<｜tool▁sep｜>")
    tags = tag("<｜tool▁call▁begin｜>"), tag("<｜tool▁call▁end｜>")
    return in_blocks(text, lambda body: [_call(body, separator)], tags, end=after_arguments(separator))


def _call(body: str, separator: str) -> WrittenCall | str:
    before, separated, after = body.partition(separator)
    if not separated:
        return "a call is a name and arguments with <｜tool▁sep｜> between them"
    if after.lstrip().startswith("{"):  # the form of V3.1; a string in the JSON may contain a block
        return json_arguments(before, after)
    name, _, rest = after.partition("```")
    arguments, closed, _ = rest.rpartition("```")
    return json_arguments(name, arguments.removeprefix("json").strip()) if closed else json_arguments(before, after)
