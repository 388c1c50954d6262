"""Chats of records in a tokenizer's chat template: prompts, and answers of more than one text."""

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
"""Errors with which chat templates refuse messages."""

_WORD = "wq7vword"
_OTHER = "wq8vother"

Chat = Sequence[Mapping[str, Any]]
Schemas = Sequence[Mapping[str, Any]]


class Segment(NamedTuple):
    """A part of an answer as the template writes it.

    Attributes:
      imitated: The assistant says it, and nobody else.
    """

    text: str
    imitated: bool


class RenderedChats:
    """Chats as the template of a tokenizer writes them.

    Args:
      control: The tokenizer's special tokens.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, control: ControlTokens) -> None:
        self._tokenizer, self._control = tokenizer, control
        self._source = str(tokenizer.get_chat_template(tools=None)) if tokenizer.chat_template is not None else ""

    def prompts(self, chats: Sequence[Chat], tools: Sequence[Schemas | None]) -> list[str]:
        """Each chat with the assistant's turn opened, or left open where the chat ends with words of the assistant."""
        if not any(tools) and not any(_continued(chat) for chat in chats):
            return cast(list[str], self._render([self._given(chat) for chat in chats], add_generation_prompt=True))
        return [self.prompt(chat, shown) for chat, shown in zip(chats, tools, strict=True)]

    def prompt(self, chat: Chat, tools: Schemas | None = None) -> str:
        """One chat, as of `prompts`."""
        how = {"continue_final_message": True} if _continued(chat) else {"add_generation_prompt": True}
        return self._text(chat, tools, **how)

    def answer(self, prompt: Chat, answer: Chat, *, place: str) -> list[Segment]:
        """Messages of an answer as they stand behind the prompt.

        Raises:
          Refusal: The template refuses the messages, leaves some of an answer out, or does not begin with the prompt.
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
        """Refuse an answer whose reasoning or calls the template leaves out: without them the text is the same."""
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
        """End of an earlier turn of the assistant: behind the last token that ends turns before the next message."""
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
        """Length of the last turn, without what a template writes behind its end."""
        if self._closing and (at := text.rfind(self._closing)) >= 0:
            return at + len(self._closing)
        ends = [found.end() for found in self._control.found_in(text)]
        return ends[-1] if ends and not text[ends[-1] :].strip() else len(text)

    @cached_property
    def _closing(self) -> str:
        """Token that ends a turn of the assistant; empty if none does."""
        after = self._text([_USER, {"role": "assistant", "content": _WORD}]).rpartition(_WORD)[2]
        return next((found[0] for found in self._control.found_in(after)), "")

    def _text(self, chat: Chat, tools: Schemas | None = None, **how: Any) -> str:
        return cast(str, self._render(self._given(chat), tools=list(tools) if tools else None, **how))

    def _render(self, chats: list[Any], **how: Any) -> Any:
        return render_chat(self._tokenizer, chats, **how)

    def _given(self, chat: Chat) -> list[dict[str, Any]]:
        """Messages as the template takes them: reasoning under its name for it, arguments as an object or as text."""
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
        """True if the template shows arguments of calls only where they are JSON text."""
        forms = (_called(_WORD), _with_text(_called(_WORD)))
        shown = (form is forms[1] for tools in _TOOLS for form in forms if self._shows([_USER, _calling(form)], tools))
        return next(shown, False)

    @cached_property
    def _knows_tools(self) -> bool:
        """True if the template shows a tool's answer; else a user says it, as in the server."""
        call = _with_text(_called("?")) if self._arguments_as_text else _called("?")
        answer = {"role": "tool", "content": _WORD, "name": "f", "tool_call_id": call["id"]}
        return any(self._shows([_USER, _calling(call), answer], tools) for tools in _TOOLS)

    def _shows(self, chat: list[Any], tools: list[Any] | None) -> bool:
        """True if the template writes the word that a chat holds."""
        try:
            return _WORD in str(self._render(chat, tools=tools))
        except REFUSALS:
            return False


def _told_by_users(chat: Chat) -> list[Mapping[str, Any]]:
    """The chat in which users say what tools answered, behind their own words where these stand before."""
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
    """Two contents as one, with an empty line between: texts, or lists of parts."""
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
"""Tools beside a chat: none, as beside a record's prompt, or one, as beside an episode's."""


def _continued(chat: Chat) -> bool:
    """True if a prompt ends with words of the assistant, which the policy continues."""
    return bool(chat) and chat[-1].get("role") == "assistant"


def _with_text(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    return {**call, "function": {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}}
