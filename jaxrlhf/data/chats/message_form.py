"""Form in which a chat template takes messages: reasoning, tool calls and answers of tools."""

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import takewhile
from typing import Any

from transformers import PreTrainedTokenizerBase

from jaxrlhf.data.chats.messages import REASONING
from jaxrlhf.data.tokenizer import TEMPLATE_ERRORS, render_chat

PROBE = "wq7vword"
"""Made-up word, found in the text of a rendered chat if the template shows the message."""

USER = {"role": "user", "content": "?"}
_SCHEMA = {"type": "object", "properties": {"q": {"type": "string", "description": "A word."}}, "required": ["q"]}
_TOOLS = (None, [{"type": "function", "function": {"name": "f", "description": "A tool.", "parameters": _SCHEMA}}])
"""Tool lists to probe a template with: none, as for the prompt of a record, or one tool, as in an episode."""


class MessageForm:
    """Form in which a tokenizer's chat template takes messages, found by rendering short chats.

    Attributes:
      source: Text of the template.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self.source = str(tokenizer.get_chat_template(tools=[{}]))

    def given(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Convert a message: the template's name of the reasoning field, arguments as objects or text, a content."""
        given = dict(message)
        if given.get("content") is None:
            given["content"] = ""
        thought = next((given[name] for name in REASONING if given.get(name) is not None), None)
        if thought is not None:
            names = [name for name in REASONING if f"message.{name}" in self.source] or [REASONING[0]]
            given |= dict.fromkeys(names, thought)
        if given.get("tool_calls"):
            form = self._call_form or as_object
            given["tool_calls"] = [_with_arguments(call, form) for call in given["tool_calls"]]
        return given

    @property
    def shows_calls(self) -> bool:
        """True if the template shows tool calls."""
        return self._call_form is not None

    @cached_property
    def shows_answers(self) -> bool:
        """True if the template shows tool messages; if not, they are rendered as user messages."""
        call = _with_arguments(_call("?"), self._call_form or as_object)
        answer = {"role": "tool", "content": PROBE, "name": "f", "tool_call_id": call["id"]}
        return any(self._shows([_calling(call), answer], tools) for tools in _TOOLS)

    @cached_property
    def _call_form(self) -> Any:
        """Function that converts arguments to the form in which the template shows them; None if no call is shown."""
        for tools in _TOOLS:
            for form in (as_object, _as_json):
                if self._shows([_calling(_with_arguments(_call(PROBE), form))], tools):
                    return form
        return None

    def _shows(self, messages: list[Any], tools: list[Any] | None) -> bool:
        """Return True if the template renders messages after a user's, and the text contains `PROBE`."""
        try:
            return PROBE in str(render_chat(self._tokenizer, [USER, *messages], tools=tools))
        except TEMPLATE_ERRORS:
            return False


def answers_as_users(chat: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Turn tool messages into user messages, each joined with the user messages before and after it."""
    groups: list[list[Mapping[str, Any]]] = []
    answered = False
    for message in chat:
        answer = message.get("role") == "tool"
        joins = answer or (answered and message.get("role") == "user")
        if joins and groups and groups[-1][0].get("role") in ("user", "tool"):
            groups[-1].append(message)
        else:
            groups.append([message])
        answered = answer
    return [
        group[0]
        if len(group) == 1 and group[0].get("role") != "tool"
        else {"role": "user", "content": _joined([message.get("content") for message in group])}
        for group in groups
    ]


def as_object(arguments: Any) -> Any:
    """Return the arguments of a call as an object; OpenAI's format writes them as JSON text."""
    if not isinstance(arguments, str):
        return arguments
    read = json.loads(arguments or "{}")
    if not isinstance(read, dict):
        raise ValueError(f"the arguments of a call are {arguments!r:.40}, and no JSON object")
    return read


def _as_json(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _joined(contents: Sequence[Any]) -> Any:
    """Join contents with an empty line between them; the result has parts if one of them has."""
    if len(contents) == 1:
        return contents[0]
    texts = [*takewhile(lambda content: not isinstance(content, list), contents)]
    text, rest = "\n\n".join(str(content or "") for content in texts), contents[len(texts) :]
    if not rest:
        return text
    first, *others = [text, *rest] if texts else rest
    return [*_parts(first), *(part for other in others for part in (*_parts("\n\n"), *_parts(other)))]


def _parts(content: Any) -> list[Any]:
    return content if isinstance(content, list) else [{"type": "text", "text": content or ""}]


def _call(word: str) -> dict[str, Any]:
    return {"type": "function", "id": "call00000", "function": {"name": "f", "arguments": {"q": word}}}


def _calling(call: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def _with_arguments(call: Mapping[str, Any], form: Any) -> dict[str, Any]:
    return {**call, "function": {**call["function"], "arguments": form(call["function"]["arguments"])}}
