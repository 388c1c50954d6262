"""Chats of records rendered by a tokenizer's chat template: prompts, and answers that are messages."""

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple, cast

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from jaxrlhf.config import Refusal
from jaxrlhf.config.refusal import reason_of
from jaxrlhf.data.chats.messages import REASONING
from jaxrlhf.data.control_tokens import ControlTokens
from jaxrlhf.data.tokenizer import render_chat

REFUSALS = (TemplateError, TypeError, LookupError, AttributeError, ValueError, ArithmeticError)
"""Exceptions by which chat templates reject messages."""

_WORD = "wq7vword"
_OTHER = "wq8vother"

Chat = Sequence[Mapping[str, Any]]
Schemas = Sequence[Mapping[str, Any]]


class Segment(NamedTuple):
    """Part of an answer as the template renders it.

    Attributes:
      imitated: True if the assistant says it; only such segments are imitated in training.
    """

    text: str
    imitated: bool


class RenderedChats:
    """Chats rendered by a tokenizer's chat template.

    Args:
      control: The tokenizer's special tokens.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, control: ControlTokens) -> None:
        self._tokenizer, self._control = tokenizer, control
        self._source = str(tokenizer.get_chat_template(tools=None)) if tokenizer.chat_template is not None else ""

    def prompts(self, chats: Sequence[Chat], tools: Sequence[Schemas | None]) -> list[str]:
        """Render each chat with the assistant's turn opened at the end; a final assistant message is left open."""
        if not any(tools) and not any(_continued(chat) for chat in chats):
            return cast(list[str], self._render([self._given(chat) for chat in chats], add_generation_prompt=True))
        return [self.prompt(chat, shown) for chat, shown in zip(chats, tools, strict=True)]

    def prompt(self, chat: Chat, tools: Schemas | None = None) -> str:
        """Render one chat, as `prompts` does."""
        how = {"continue_final_message": True} if _continued(chat) else {"add_generation_prompt": True}
        return self._text(chat, tools, **how)

    def answer(self, prompt: Chat, answer: Chat, *, place: str) -> list[Segment]:
        """Render the messages of an answer after the prompt, split into segments.

        Raises:
          Refusal: The template rejects the messages, drops a part of an answer, or renders the prompt differently.
        """
        try:
            return self._segments(prompt, answer, place)
        except REFUSALS as error:
            if isinstance(error, Refusal):
                raise
            raise Refusal(f"{place}: the tokenizer's chat template refuses this answer: {reason_of(error)}") from error

    def _segments(self, prompt: Chat, answer: Chat, place: str) -> list[Segment]:
        if _continued(prompt):
            raise Refusal(
                f"{place}: the prompt ends with words of the assistant, and the answer is messages, which would be "
                "another turn; give the answer as a text"
            )
        whole, end = self._text([*prompt, *answer]), 0
        segments: list[Segment] = []
        for n, message in enumerate(answer):
            if message["role"] != "assistant":
                continue
            opened = self.prompt([*prompt, *answer[:n]])
            if not whole.startswith(opened):
                raise Refusal(
                    f"{place}: the chat template does not write the whole chat as it writes the beginning before an "
                    "answer with the assistant's turn opened, so the answer cannot be cut from it; give a text, or "
                    "mend the template"
                )
            if segments:
                segments.append(Segment(whole[end : len(opened)], False))
            start = len(opened)
            last = n == len(answer) - 1
            end = start + self._ended(whole[start:]) if last else self._end(prompt, answer, n, whole, start, place)
            segments.append(Segment(whole[start:end], True))
            self._check_shown(prompt, answer, n, whole, place)
        return segments

    def _check_shown(self, prompt: Chat, answer: Chat, n: int, whole: str, place: str) -> None:
        """Refuse an answer whose reasoning or calls the template drops: without them the rendered text is the same."""
        parts = {"the reasoning": REASONING, "the calls of tools": ("tool_calls",)}
        for words, names in parts.items():
            if not answer[n].keys() & set(names):
                continue
            less = [*answer]
            less[n] = {key: value for key, value in answer[n].items() if key not in names}
            if self._text([*prompt, *less]) == whole:
                raise Refusal(
                    f"{place}: the tokenizer's chat template leaves out {words} of an answer; take that out of the "
                    "record, or a tokenizer whose template writes it"
                )

    def _end(self, prompt: Chat, answer: Chat, n: int, whole: str, start: int, place: str) -> int:
        """Return the end of an earlier assistant turn: after the last turn-ending token before the next message."""
        changed = [*answer]
        changed[n + 1] = {**changed[n + 1], "content": _OTHER}
        other = self._text([*prompt, *changed])
        same = next((at for at, pair in enumerate(zip(whole, other, strict=False)) if pair[0] != pair[1]), len(whole))
        shown = self._closing and same < len(whole) and answer[n + 1]["role"] != "assistant"
        at = whole.rfind(self._closing, start, same) if shown else -1
        if at < 0:
            raise Refusal(
                f"{place}: the chat template does not show where an earlier turn of the assistant ends, so what is to "
                "be imitated cannot be told; put the earlier turns into the prompt"
            )
        return at + len(self._closing)

    def _ended(self, text: str) -> int:
        """Return the length of the last turn, without text that a template writes after the end of the turn."""
        if self._closing and (at := text.rfind(self._closing)) >= 0:
            return at + len(self._closing)
        ends = [found.end() for found in self._control.found_in(text)]
        return ends[-1] if ends and not text[ends[-1] :].strip() else len(text)

    @cached_property
    def _closing(self) -> str:
        """Special token that ends a turn of the assistant; empty if there is none."""
        after = self._text([_USER, {"role": "assistant", "content": _WORD}]).rpartition(_WORD)[2]
        return next((found[0] for found in self._control.found_in(after)), "")

    def _text(self, chat: Chat, tools: Schemas | None = None, **how: Any) -> str:
        return cast(str, self._render(self._given(chat), tools=list(tools) if tools else None, **how))

    def _render(self, chats: list[Any], **how: Any) -> Any:
        return render_chat(self._tokenizer, chats, **how)

    def _given(self, chat: Chat) -> list[dict[str, Any]]:
        """Convert messages to the template's form: its name of the reasoning field, arguments as an object or text."""
        given = [dict(message) for message in (chat if self._knows_tools else _told_by_users(chat))]
        for message in given:
            thought = next((message[name] for name in REASONING if message.get(name)), None)
            if thought is not None:
                names = [name for name in REASONING if f"message.{name}" in self._source] or [REASONING[0]]
                message |= dict.fromkeys(names, thought)
            if message.get("tool_calls") and self._arguments_as_text:
                message["tool_calls"] = [_with_text(call) for call in message["tool_calls"]]
        return given

    @cached_property
    def _arguments_as_text(self) -> bool:
        """True if the template shows arguments of calls only when they are JSON text."""
        forms = (_called(_WORD), _with_text(_called(_WORD)))
        shown = (form is forms[1] for tools in _TOOLS for form in forms if self._shows([_USER, _calling(form)], tools))
        return next(shown, False)

    @cached_property
    def _knows_tools(self) -> bool:
        """True if the template shows tool messages; if not, they are rendered as user messages, as in the server."""
        call = _with_text(_called("?")) if self._arguments_as_text else _called("?")
        answer = {"role": "tool", "content": _WORD, "name": "f", "tool_call_id": call["id"]}
        return any(self._shows([_USER, _calling(call), answer], tools) for tools in _TOOLS)

    def _shows(self, chat: list[Any], tools: list[Any] | None) -> bool:
        """Return True if the template renders the chat and its text contains `_WORD`."""
        try:
            return _WORD in str(self._render(chat, tools=tools))
        except REFUSALS:
            return False


def _told_by_users(chat: Chat) -> list[Mapping[str, Any]]:
    """Turn tool messages into user messages; one that follows a user message is appended to that message."""
    told: list[Mapping[str, Any]] = []
    for message in chat:
        if message.get("role") != "tool":
            told.append(message)
        elif told and told[-1].get("role") == "user":
            told[-1] = {"role": "user", "content": _joined(told[-1]["content"], message["content"])}
        else:
            told.append({"role": "user", "content": message["content"]})
    return told


def _joined(first: Any, second: Any) -> Any:
    """Join two contents with an empty line between them: texts, or lists of parts."""
    if isinstance(first, str) and isinstance(second, str):
        return f"{first}\n\n{second}"
    return [*first, {"type": "text", "text": "\n\n"}, *second]


def _called(word: str) -> dict[str, Any]:
    return {"type": "function", "id": "call00000", "function": {"name": "f", "arguments": {"q": word}}}


def _calling(call: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": "", "tool_calls": [call]}


_USER = {"role": "user", "content": "?"}
_SCHEMA = {"type": "object", "properties": {"q": {"type": "string", "description": "A word."}}, "required": ["q"]}
_TOOLS = (None, [{"type": "function", "function": {"name": "f", "description": "A tool.", "parameters": _SCHEMA}}])
"""Tool lists to probe a template with: none, as for the prompt of a record, or one tool, as in an episode."""


def _continued(chat: Chat) -> bool:
    """Return True if a prompt ends with an assistant message, which the policy continues."""
    return bool(chat) and chat[-1].get("role") == "assistant"


def _with_text(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    return {**call, "function": {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}}
