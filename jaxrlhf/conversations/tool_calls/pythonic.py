"""Tool calls as a list in Python, as in Llama 4 and LFM2: `[add(a=1, b=2), now()]`.

LFM2 writes `<|tool_call_start|>` and `<|tool_call_end|>` around the list; without tags the list is the whole reply.
"""

import ast
import keyword
import re
import warnings
from collections.abc import Collection
from typing import Any

from jaxrlhf.conversations.tool_calls.written import CallBlock, Tag, Written, WrittenCall, after_last, in_blocks

SIGNS = ("<|tool_call_start|>", "<|header_start|>")
OPENINGS, BEGINNINGS = ("<|tool_call_start|>",), ("[",)
_LIST = re.compile(r"\s*+\[\s*+[\w.]++\(")
_KEPT_NAME = "\u00b7"  # suffix of names that are Python keywords: valid in Python, and no parameter's name has it
_BREAKS = {"\n": "\\n", "\r": "\\r"}
_LINE = re.compile(r"\\.|[\n\r]", re.DOTALL)
_WORDS = "|".join(keyword.kwlist)
_SPELLED = re.compile(
    r'"""(?:\\.|(?!""").)*+"""|'
    r"'''(?:\\.|(?!''').)*+'''|"
    r'(?P<line>"(?:\\.|[^"\\])*+"|'
    r"'(?:\\.|[^'\\])*+')|"
    rf"(?<=[(,\s])(?P<name>{_WORDS})(?P<equals>\s*+=)(?!=)",
    re.DOTALL,
)
"""Pattern of strings, and of parameter names that are keywords of Python."""


def find(text: str, tag: Tag, names: Collection[str]) -> Written:
    """Find the calls of a reply."""
    tags = tag("<|tool_call_start|>"), tag("<|tool_call_end|>")
    written = in_blocks(text, python_calls, tags, end=after_last(")]", tags[0]))
    if not written.calls and _LIST.match(text) and text.rstrip().endswith(")]"):
        return Written([CallBlock(text, python_calls(text))])
    return written


def python_calls(text: str) -> list[WrittenCall | str]:
    """Parse the calls of an expression: one call, or a list of calls."""
    tree = parsed(text.strip(), "eval")
    return [tree] if isinstance(tree, str) else calls_in(tree.body)


def calls_in(tree: ast.expr) -> list[WrittenCall | str]:
    """Return the calls of a parsed Python expression."""
    items = tree.elts if isinstance(tree, ast.List | ast.Tuple) else [tree]
    return [_call(item) for item in items] or ["a list of calls is empty"]


def parsed(text: str, mode: str) -> Any:
    """Parse a text as Python; return its tree, or an error text.

    Line breaks are allowed in strings without triple quotes, and keywords of Python as names of parameters: models
    write both, and templates show them.
    """
    problem = ""
    for given in (text, _SPELLED.sub(_as_python, text)):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about unknown escapes in strings
                return ast.parse(given, mode=mode)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            problem = problem or f"a call is not Python: {error}"
    return problem


def _as_python(found: re.Match[str]) -> str:
    if found["name"] is not None:
        return f"{found['name']}{_KEPT_NAME}{found['equals']}"
    if found["line"] is None:
        return found[0]
    return _LINE.sub(lambda part: _BREAKS.get(part[0], part[0]), found[0])


def _call(node: ast.expr) -> WrittenCall | str:
    if not isinstance(node, ast.Call) or node.args or not all(given.arg for given in node.keywords):
        return "a call is name(key=value, ...), with a name before each value"
    try:
        arguments = {
            str(given.arg).removesuffix(_KEPT_NAME): ast.literal_eval(_JsonWords().visit(given.value))
            for given in node.keywords
        }
        return WrittenCall(ast.unparse(node.func), arguments)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return "the values of a call must be written out: texts, numbers, lists, dictionaries"


class _JsonWords(ast.NodeTransformer):
    """Conversion of `true`, `false` and `null` to Python's constants."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        words = {"true": True, "false": False, "null": None}
        return ast.Constant(words[node.id]) if node.id in words else node
