"""Tool calls of Gemma: `<|tool_call>call:name{key:value}<tool_call|>` in Gemma 4, with strings between `<|"|>`.

FunctionGemma uses `<start_function_call>`, `<end_function_call>` and `<escape>` instead of these tags. Gemma 3 has no
tags; its guide prescribes a block of Python marked `tool_code`.
"""

import ast
import re
from collections.abc import Collection, Sequence
from typing import Any

from jaxrlhf.conversations.tool_calls.pythonic import calls_in, parsed, python_calls
from jaxrlhf.conversations.tool_calls.written import (
    MARK,
    CallBlock,
    Tag,
    Written,
    WrittenCall,
    in_blocks,
    past_space,
    unclosed,
)

SIGNS = ("<|tool_call>", "<start_function_call>", "<start_of_turn>")
OPENINGS = ("<|tool_call>", "<start_function_call>", "```tool_code\n")
_TAGS = (("<|tool_call>", "<tool_call|>"), ("<start_function_call>", "<end_function_call>"))
_NAME = re.compile(r"\s*+call:\s*+([^{\s]*+)\s*+(?=\{)")
_QUOTE = re.compile(f'{MARK}?(?:<\\|"\\|>|<escape>)')
_WORD = re.compile(r"[^,:{}\[\]]+")
_CODE = re.compile(r"```tool_code\n(.*?)(```|\Z)", re.DOTALL)


def find(text: str, tag: Tag, names: Collection[str]) -> Written:
    """Find the calls of a reply."""
    tags = ((tag(opening), tag(closing)) for opening, closing in _TAGS)
    written = in_blocks(text, lambda body: [_call(body)], *tags, end=_end)
    written.parts = [one for part in written.parts for one in (_code(part) if isinstance(part, str) else [part])]
    return written


def write(calls: Sequence[tuple[str, Any]]) -> str:
    """Write calls as a block of Python, for Gemma 3, whose template shows no calls."""
    lines = (f"{name}({', '.join(f'{key}={value!r}' for key, value in given.items())})" for name, given in calls)
    return "```tool_code\n" + "\n".join(lines) + "\n```"


def _code(text: str) -> list[str | CallBlock]:
    """Split a text into parts; a block of Python becomes calls, one a line."""
    parts, at = list[str | CallBlock](), 0
    for code in _CODE.finditer(text):
        tree = parsed(code[1].strip(), "exec")
        calls: list[WrittenCall | str] = []
        if not code[2]:
            calls = [unclosed("```")]
        elif isinstance(tree, str):  # single lines may be valid
            calls = [call for line in code[1].strip().splitlines() for call in python_calls(line)]
        for statement in [] if calls else tree.body:
            calls += calls_in(statement.value) if isinstance(statement, ast.Expr) else python_calls(code[1])[:1]
        parts += [text[at : code.start()], CallBlock(code[0], calls or python_calls(code[1]))]
        at = code.end()
    return [*parts, text[at:]]


def _end(text: str, begin: int, closing: str) -> int:
    """Return the index of the closing tag after the arguments; -1 if there is none."""
    found = _NAME.match(text, begin)
    if found is None:
        return -1
    try:
        _, at = _value(text, found.end(), 0)
    except ValueError:
        return -1
    at = past_space(text, at)
    return at if text.startswith(closing, at) else -1


def _call(body: str) -> WrittenCall | str:
    found = _NAME.match(body)
    if found is None:
        return "a call is call:name{key:value}"
    try:
        value, end = _value(body, found.end(), 0)
    except ValueError as error:
        return f"the arguments of a call cannot be read: {error}"
    return WrittenCall(found[1], value) if not body[end:].strip() else "a call ends with its arguments"


def _value(text: str, at: int, depth: int) -> tuple[Any, int]:
    """Parse the value at an index of the text; return the value and the index after it."""
    if depth > 50:
        raise ValueError("values are nested too deep")
    at = past_space(text, at)
    quote = _QUOTE.match(text, at)
    if quote:
        end = _QUOTE.search(text, quote.end())
        if end is None:
            raise ValueError("a string has no end")
        return text[quote.end() : end.start()], end.end()
    if text[at : at + 1] == '"':
        if (shut := text.find('"', at + 1)) < 0:
            raise ValueError("a string has no end")
        return text[at + 1 : shut], shut + 1
    if text[at : at + 1] in ("{", "["):
        return _several(text, at, depth)
    word = _WORD.match(text, at)
    if word is None:
        raise ValueError(f"no value at {text[at : at + 20]!r}")
    return _word(word[0].strip()), word.end()


def _several(text: str, at: int, depth: int) -> tuple[Any, int]:
    """Parse the object or list at an index of the text; return it and the index after it."""
    named = text[at] == "{"
    close = "}" if named else "]"
    pairs: list[tuple[Any, Any]] = []
    at = past_space(text, at + 1)
    while text[at : at + 1] != close:
        key: Any = None
        if named:
            key, at = _value(text, at, depth + 1)
            at = past_space(text, at)
            if text[at : at + 1] != ":":
                raise ValueError(f"a key without a value at {text[at : at + 20]!r}")
            at += 1
        item, at = _value(text, at, depth + 1)
        pairs.append((str(key), item))
        at = past_space(text, at)
        if text[at : at + 1] == ",":
            at = past_space(text, at + 1)
        elif text[at : at + 1] != close:
            raise ValueError(f"no {close} at the end")
    return (dict(pairs) if named else [item for _, item in pairs]), at + 1


def _word(word: str) -> Any:
    """Return the number, true, false or null that a word spells; any other word is a string."""
    words = {"true": True, "false": False, "null": None, "None": None}
    if word in words:
        return words[word]
    for kind in (int, float):
        if re.fullmatch(r"[-+]?\d[\d.eE+-]*", word):
            try:
                return kind(word)
            except ValueError:
                continue
    return word
