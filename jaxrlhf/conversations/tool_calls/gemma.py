"""Calls of Gemma: `<|tool_call>call:name{key:value}<tool_call|>` of Gemma 4, its texts between `<|"|>`.

FunctionGemma has `<start_function_call>`, `<end_function_call>` and `<escape>` in their places. Gemma 3 has no tags of
its own; its guide asks for a block of Python marked `tool_code`.
"""

import re
from typing import Any

from jaxrlhf.conversations.tool_calls.pythonic import python_calls
from jaxrlhf.conversations.tool_calls.written import MARK, Tag, Written, WrittenCall, in_blocks, unclosed

SIGNS = ("<|tool_call>", "<start_function_call>", "<start_of_turn>")
_TAGS = (("<|tool_call>", "<tool_call|>"), ("<start_function_call>", "<end_function_call>"))
_CALL = re.compile(r"\s*+call:\s*+([^{\s]*+)\s*+(\{.*\})\s*", re.DOTALL)
_QUOTE = re.compile(f'{MARK}?(?:<\\|"\\|>|<escape>)')
_WORD = re.compile(r"[^,:{}\[\]]+")
_CODE = re.compile(r"```tool_code\n(.*?)(```|\Z)", re.DOTALL)


def find(text: str, tag: Tag) -> Written:
    """Calls of a reply."""
    tags = ((tag(opening), tag(closing)) for opening, closing in _TAGS)
    written = in_blocks(text, lambda body: [_call(body)], *tags)
    for code in _CODE.finditer(written.content):
        calls = [call for line in code[1].strip().splitlines() for call in python_calls(line)]
        written.calls += calls if code[2] else [unclosed("```")]
    written.content = _CODE.sub("", written.content)
    return written


def _call(body: str) -> WrittenCall | str:
    found = _CALL.fullmatch(body)
    if found is None:
        return "a call is call:name{key:value}"
    try:
        value, end = _value(found[2], 0, 0)
    except ValueError as error:
        return f"the arguments of a call cannot be read: {error}"
    return WrittenCall(found[1], value) if end == len(found[2]) else "a call ends with its arguments"


def _value(text: str, at: int, depth: int) -> tuple[Any, int]:
    """Value that begins at a place of the text, and the place after it."""
    if depth > 50:
        raise ValueError("values lie too deep in each other")
    at = _past_space(text, at)
    quote = _QUOTE.match(text, at)
    if quote:
        end = _QUOTE.search(text, quote.end())
        if end is None:
            raise ValueError("a text has no end")
        return text[quote.end() : end.start()], end.end()
    if text[at : at + 1] == '"':
        if (shut := text.find('"', at + 1)) < 0:
            raise ValueError("a text has no end")
        return text[at + 1 : shut], shut + 1
    if text[at : at + 1] in ("{", "["):
        return _several(text, at, depth)
    word = _WORD.match(text, at)
    if word is None:
        raise ValueError(f"no value at {text[at : at + 20]!r}")
    return _word(word[0].strip()), word.end()


def _several(text: str, at: int, depth: int) -> tuple[Any, int]:
    """Object or list that begins at a place."""
    named = text[at] == "{"
    close = "}" if named else "]"
    pairs: list[tuple[Any, Any]] = []
    at = _past_space(text, at + 1)
    while text[at : at + 1] != close:
        key: Any = None
        if named:
            key, at = _value(text, at, depth + 1)
            at = _past_space(text, at)
            if text[at : at + 1] != ":":
                raise ValueError(f"a key without a value at {text[at : at + 20]!r}")
            at += 1
        item, at = _value(text, at, depth + 1)
        pairs.append((str(key), item))
        at = _past_space(text, at)
        if text[at : at + 1] == ",":
            at = _past_space(text, at + 1)
        elif text[at : at + 1] != close:
            raise ValueError(f"no {close} at the end")
    return (dict(pairs) if named else [item for _, item in pairs]), at + 1


def _past_space(text: str, at: int) -> int:
    while text[at : at + 1].isspace():
        at += 1
    return at


def _word(word: str) -> Any:
    """Number, true, false, null, or the word itself."""
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
