"""Calls as Python writes them in a list, as of Llama 4 and LFM2: `[add(a=1, b=2), now()]`.

LFM2 has `<|tool_call_start|>` and `<|tool_call_end|>` around them; without such tags the list is the whole reply.
"""

import ast
import warnings

from jaxrlhf.conversations.tool_calls.written import Tag, Written, WrittenCall, in_blocks

SIGNS = ("<|tool_call_start|>", "<|header_start|>")


def find(text: str, tag: Tag) -> Written:
    """Calls of a reply."""
    written = in_blocks(text, python_calls, (tag("<|tool_call_start|>"), tag("<|tool_call_end|>")))
    if not written.calls and text.strip().startswith("[") and text.strip().endswith(")]"):
        return Written("", python_calls(text))
    return written


def python_calls(text: str) -> list[WrittenCall | str]:
    """Calls of an expression: one, or a list of them."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes in texts that Python does not know
            tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return [f"a call is not Python: {error}"]
    items = tree.elts if isinstance(tree, ast.List | ast.Tuple) else [tree]
    return [_call(item) for item in items] or ["a list of calls is empty"]


def _call(node: ast.expr) -> WrittenCall | str:
    if not isinstance(node, ast.Call) or node.args or not all(keyword.arg for keyword in node.keywords):
        return "a call is name(key=value, ...), with a name before each value"
    try:
        arguments = {str(keyword.arg): ast.literal_eval(_JsonWords().visit(keyword.value)) for keyword in node.keywords}
        return WrittenCall(ast.unparse(node.func), arguments)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return "the values of a call must be written out: texts, numbers, lists, dictionaries"


class _JsonWords(ast.NodeTransformer):
    """Change of `true`, `false` and `null` to Python's words."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        words = {"true": True, "false": False, "null": None}
        return ast.Constant(words[node.id]) if node.id in words else node
