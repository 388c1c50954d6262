"""Tool calls as each family writes them, by a grammar of their own: good ones, and ones with a known fault."""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Calls = list[tuple[str, dict[str, Any]]]

NOTE = {
    "type": "function",
    "function": {
        "name": "note",
        "description": "Note something.",
        "parameters": {
            "type": "object",
            "properties": {
                "text": {"type": "string"},
                "count": {"type": "integer"},
                "ratio": {"type": "number"},
                "flag": {"type": "boolean"},
                "items": {"type": "array", "items": {"type": "string"}},
                "extra": {"type": "object"},
                "perhaps": {"type": "string", "nullable": True},
            },
            "required": ["text"],
        },
    },
}
NOW = {"type": "function", "function": {"name": "get_time", "parameters": {"type": "object", "properties": {}}}}

_WORDS = (
    "sum",
    "12",
    "true",
    "null",
    "a b",
    "naïve",
    "你好",
    "x<y",
    "{",
    "}",
    "[1]",
    "it's",
    'say "hi"',
    "#",
    "C:\\d",
    "a, b",
)


def arguments(draw: random.Random) -> dict[str, Any]:
    """Arguments of `note`, some left out."""
    word = draw.choice
    whole = {
        "text": " ".join(word(_WORDS) for _ in range(draw.randint(1, 4))),
        "count": draw.randint(-99, 9999),
        "ratio": word([0.5, -1.25, 3.75, 1e-05]),
        "flag": draw.random() < 0.5,
        "items": [word(_WORDS) for _ in range(draw.randint(0, 3))],
        "extra": {"k": word([1, "v", None, True, [1, 2], {"deep": "x"}])},
        "perhaps": word([None, "yes"]),
    }
    return {key: value for key, value in whole.items() if key == "text" or draw.random() < 0.5}


def as_json(call: tuple[str, dict[str, Any]], key: str = "arguments") -> str:
    return json.dumps({"name": call[0], key: call[1]}, ensure_ascii=False)


def plain(value: Any) -> str:
    """Value in a tag: a text as it is, others as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def gemma(value: Any, quote: str = '<|"|>') -> str:
    match value:
        case str():
            return quote + value + quote
        case dict():
            return "{" + ",".join(f"{key}:{gemma(item, quote)}" for key, item in value.items()) + "}"
        case list():
            return "[" + ",".join(gemma(item, quote) for item in value) + "]"
    return json.dumps(value)


def python(call: tuple[str, dict[str, Any]]) -> str:
    return f"{call[0]}({', '.join(f'{key}={value!r}' for key, value in call[1].items())})"


def each(form: Callable[[str, dict[str, Any]], str], between: str = "\n") -> Callable[[Calls], str]:
    return lambda calls: between.join(form(name, given) for name, given in calls)


def xml(name: str, given: dict[str, Any]) -> str:
    parameters = "".join(f"<parameter={key}>\n{plain(value)}\n</parameter>\n" for key, value in given.items())
    return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"


def glm(name: str, given: dict[str, Any]) -> str:
    pairs = "".join(
        f"<arg_key>{key}</arg_key>\n<arg_value>{plain(value)}</arg_value>\n" for key, value in given.items()
    )
    return f"<tool_call>{name}\n{pairs}</tool_call>"


def invoke(prefix: str) -> Callable[[str, dict[str, Any]], str]:
    def form(name: str, given: dict[str, Any]) -> str:
        parameters = "".join(
            f'<{prefix}parameter name="{key}">{plain(value)}</{prefix}parameter>\n' for key, value in given.items()
        )
        return f'<{prefix}invoke name="{name}">\n{parameters}</{prefix}invoke>\n'

    return form


def between(opening: str, inside: Callable[[Calls], str], closing: str) -> Callable[[Calls], str]:
    return lambda calls: opening + inside(calls) + closing


@dataclass(frozen=True)
class Form:
    """Form of a family's calls.

    Attributes:
      sign: Part of the family's chat template.
      write: Text of calls.
      end: Text at the end of `write`'s whose loss leaves a call unfinished.
      special: Special tokens, after the beginning and the end of a text.
      tags: Further tokens of its own.
      content: A reply may have words before its calls.
      one: A reply has one call at most.
    """

    family: str
    sign: str
    write: Callable[[Calls], str]
    end: str
    special: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    content: bool = True
    one: bool = False


_V3 = (
    *("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>"),
    *("<｜tool▁call▁end｜>", "<｜tool▁sep｜>"),
)
_KIMI = (
    *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>"),
    *("<|tool_call_argument_begin|>", "<|tool_call_end|>"),
)
_HERMES = each(lambda name, given: f"<tool_call>\n{as_json((name, given))}\n</tool_call>")


def _dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


FORMS = {
    "hermes": Form("hermes", "<tool_call>", _HERMES, "</tool_call>", tags=("<tool_call>", "</tool_call>")),
    "hermes in letters": Form("hermes", "<tool_call>", _HERMES, "</tool_call>"),
    "phi 4": Form(
        "hermes",
        "<|tool_call|>",
        between("<|tool_call|>", lambda calls: "[" + ", ".join(map(as_json, calls)) + "]", "<|/tool_call|>"),
        "<|/tool_call|>",
        ("<|tool_call|>", "<|/tool_call|>"),
    ),
    "qwen xml": Form("qwen_xml", "<function=", each(xml), "</tool_call>", tags=("<tool_call>", "</tool_call>")),
    "glm": Form(
        "glm",
        "<arg_key>",
        each(glm),
        "</tool_call>",
        tags=("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    ),
    "llama 3": Form(
        "llama",
        "<|start_header_id|>",
        lambda calls: "; ".join(as_json(call, "parameters") for call in calls),
        "}",
        ("<|start_header_id|>", "<|python_tag|>"),
        content=False,
    ),
    "llama 3 with a tag": Form(
        "llama",
        "<|start_header_id|>",
        lambda calls: "<|python_tag|>" + "; ".join(as_json(call, "parameters") for call in calls),
        "}",
        ("<|start_header_id|>", "<|python_tag|>"),
    ),
    "lfm2": Form(
        "pythonic",
        "<|tool_call_start|>",
        between("<|tool_call_start|>[", lambda calls: ", ".join(map(python, calls)), "]<|tool_call_end|>"),
        "<|tool_call_end|>",
        ("<|tool_call_start|>", "<|tool_call_end|>"),
    ),
    "llama 4": Form(
        "pythonic",
        "<|header_start|>",
        between("[", lambda calls: ", ".join(map(python, calls)), "]"),
        "",
        ("<|header_start|>",),
        content=False,
    ),
    "mistral": Form(
        "mistral",
        "[TOOL_CALLS]",
        between("[TOOL_CALLS][", lambda calls: ", ".join(map(as_json, calls)), "]"),
        "]",
        ("[TOOL_CALLS]",),
    ),
    "mistral with names": Form(
        "mistral",
        "[TOOL_CALLS]",
        each(lambda name, given: f"[TOOL_CALLS]{name}[ARGS]{_dump(given)}", ""),
        "}",
        ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
    ),
    "gemma 4": Form(
        "gemma",
        "<|tool_call>",
        each(lambda name, given: f"<|tool_call>call:{name}{gemma(given)}<tool_call|>", ""),
        "<tool_call|>",
        ("<|tool_call>", "<tool_call|>", '<|"|>'),
    ),
    "functiongemma": Form(
        "gemma",
        "<start_function_call>",
        each(
            lambda name, given: f"<start_function_call>call:{name}{gemma(given, '<escape>')}<end_function_call>",
            "",
        ),
        "<end_function_call>",
        ("<start_function_call>", "<end_function_call>", "<escape>"),
    ),
    "gemma 3": Form(
        "gemma",
        "<start_of_turn>",
        between("```tool_code\n", lambda calls: "\n".join(map(python, calls)), "\n```"),
        "```",
        ("<start_of_turn>",),
    ),
    "deepseek v3": Form(
        "deepseek",
        "<｜tool▁calls▁begin｜>",
        between(
            "<｜tool▁calls▁begin｜>",
            each(
                lambda name, given: (
                    f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{_dump(given)}\n```<｜tool▁call▁end｜>"
                )
            ),
            "",
        ),
        "<｜tool▁call▁end｜>",
        tags=_V3,
    ),
    "deepseek v3.1": Form(
        "deepseek",
        "<｜tool▁calls▁begin｜>",
        between(
            "<｜tool▁calls▁begin｜>",
            each(lambda name, given: f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{_dump(given)}<｜tool▁call▁end｜>", ""),
            "",
        ),
        "<｜tool▁call▁end｜>",
        tags=_V3,
    ),
    "deepseek v3.2": Form(
        "deepseek",
        "｜DSML｜",
        between("<｜DSML｜function_calls>\n", each(invoke("｜DSML｜"), ""), "</｜DSML｜function_calls>"),
        "</｜DSML｜function_calls>",
    ),
    "kimi k2": Form(
        "kimi",
        "<|tool_calls_section_begin|>",
        between(
            "<|tool_calls_section_begin|>",
            each(
                lambda name, given: (
                    f"<|tool_call_begin|>functions.{name}:0<|tool_call_argument_begin|>{_dump(given)}<|tool_call_end|>"
                ),
                "",
            ),
            "",
        ),
        "<|tool_call_end|>",
        _KIMI,
    ),
    "minimax m2": Form(
        "minimax",
        "<minimax:tool_call>",
        between("<minimax:tool_call>\n", each(invoke(""), ""), "</minimax:tool_call>"),
        "</minimax:tool_call>",
        tags=("<minimax:tool_call>", "</minimax:tool_call>"),
    ),
    "gpt-oss": Form(
        "gpt_oss",
        "<|channel|>",
        each(
            lambda name, given: f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{_dump(given)}"
        ),
        "}",
        ("<|channel|>", "<|message|>", "<|constrain|>", "<|start|>", "<|end|>"),
        content=False,
        one=True,
    ),
}
