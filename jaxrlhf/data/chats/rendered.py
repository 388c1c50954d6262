"""Chats of records rendered by a tokenizer's chat template: prompts, and answers that are messages."""

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import takewhile
from typing import Any, NamedTuple, cast

from transformers import PreTrainedTokenizerBase

from jaxrlhf.config import Refusal
from jaxrlhf.config.refusal import reason_of
from jaxrlhf.data.chats.messages import REASONING, letters
from jaxrlhf.data.control_tokens import ControlTokens
from jaxrlhf.data.tokenizer import TEMPLATE_ERRORS, render_chat

_WORD = "wq7vword"
THINKING = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))
"""Opening and closing tags of thinking in the text of an answer."""

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

    def answer(self, prompt: Chat, answer: str | Chat, *, place: str) -> list[Segment]:
        """Render an answer after the prompt, split into segments; the last segment ends with an end-of-turn token.

        Each message of the assistant is learned as the template writes it when it is the last message. Where the
        template writes earlier messages in another way, they are learned as they stand in the whole chat.

        Raises:
          Refusal: The template rejects the messages, drops a part of an answer, or renders the prompt differently.
        """
        try:
            if isinstance(answer, str):
                own = Segment(answer + self._end, True) if _continued(prompt) else None
                return [own] if own else self._segments(prompt, [{"role": "assistant", "content": answer}], place)
            return self._segments(prompt, answer, place)
        except TEMPLATE_ERRORS as error:
            if isinstance(error, Refusal):
                raise
            raise Refusal(f"{place}: the tokenizer's chat template refuses this answer: {reason_of(error)}") from error

    def _segments(self, prompt: Chat, answer: Chat, place: str) -> list[Segment]:
        chat = [*prompt, *answer]
        turns = [n for n in range(len(prompt), len(chat)) if chat[n]["role"] == "assistant"]
        if any(_continued(chat[:n]) for n in turns):
            raise Refusal(
                f"{place}: a message of the answer follows words of the assistant, and would be another turn; join "
                "messages of the assistant, and give the answer as a text if the prompt ends with the assistant's words"
            )
        opened = [self.prompt(chat[:n]) for n in turns]
        segments: list[Segment] = []
        for n, before, after in zip(turns, opened, [*opened[1:], None], strict=True):
            said = self._last(chat[: n + 1], before, place)
            if after is not None and not after.startswith(before + said):
                said = self._earlier(chat[n], said, before, after, place)
            segments.append(Segment(said, True))
            if after is not None:
                segments.append(Segment(after[len(before + said) :], False))
        return segments

    def _last(self, chat: Chat, opened: str, place: str) -> str:
        """Return the last message of a chat as the template writes it after `opened`, up to the end of its turn."""
        message, said = chat[-1], self._behind(opened, self._text(chat))
        if said is None and opened.endswith(self._opening):
            # A final answer makes gpt-oss's template drop earlier reasoning, so the answer is cut from a shorter chat.
            said = self._behind(self.prompt([_USER]), self._text([_USER, message]))
        lost = _lost(message, opened, said) if said is not None else ""
        if said is not None and not lost:
            return said
        opens = next((pair for pair in THINKING if opened.rstrip().endswith(pair[0])), None)
        thinking = _with_thinking(message, opens)
        if thinking is not None:
            return thinking + self._end
        if not lost:
            begins = f"opens {opens[0]!r} in it" if opens else f"opens it with {opened[-20:]!r}"
            raise Refusal(
                f"{place}: the chat template writes an answer in another place than where it opens the assistant's "
                f"turn, and {begins}, so the answer would be learned there; give the answer with its thinking, "
                "'...</think>...', or change the template"
            )
        raise Refusal(
            f"{place}: the tokenizer's chat template leaves out {lost} of an answer; take that out of the record, or a "
            "tokenizer whose template writes it"
        )

    def _earlier(self, message: Mapping[str, Any], last: str, opened: str, later: str, place: str) -> str:
        """Return a message as the template writes it in `later`, where others follow; `last` is its form as the last.

        The forms may differ by the empty thinking at the beginning, which Qwen3's template leaves out of earlier turns.
        """
        said, end, _ = later.removeprefix(opened).partition(self._end)
        lost = _lost(message, opened, said)
        if later.startswith(opened) and end and last.endswith(said + end) and not lost:
            return said + end
        raise Refusal(
            f"{place}: the chat template writes an earlier turn of the assistant in another way once more messages "
            f"follow{f', without {lost}' if lost else ''}, so what is learned would not be what the policy sees there; "
            "make each answer a record of its own, with the earlier turns in its prompt"
        )

    def _behind(self, opened: str, whole: str) -> str | None:
        """Return the turn after `opened` up to its end; None if the text does not begin so. EOS ends an open turn."""
        if not whole.startswith(opened):
            return None
        text = whole[len(opened) :]
        if self._closing and (at := text.rfind(self._closing)) >= 0:
            return text[: at + len(self._closing)]
        ends = [found.end() for found in self._control.found_in(text)]
        if ends and not text[ends[-1] :].strip():
            return text[: ends[-1]]
        return text.removesuffix(self._after) + self._after.rstrip("\n") + self._end

    @cached_property
    def _after(self) -> str:
        """Text that the template writes after an answer."""
        return self._text([_USER, {"role": "assistant", "content": _WORD}]).rpartition(_WORD)[2]

    @cached_property
    def _closing(self) -> str:
        """Special token that ends a turn of the assistant; empty if there is none.

        The token is the last one that the template writes whether or not a message follows, as Phi writes another one
        at the end of a chat; gpt-oss ends the last turn with another token than earlier turns.
        """
        later = self._text([_USER, {"role": "assistant", "content": _WORD}, _USER]).rpartition(_WORD)[2]
        kept = len([*takewhile(lambda pair: pair[0] == pair[1], zip(self._after, later, strict=False))])
        found = [*self._control.found_in(self._after[:kept])][-1:] or [*self._control.found_in(self._after)][:1]
        return found[0][0] if found else ""

    @property
    def _end(self) -> str:
        return self._closing or str(self._tokenizer.eos_token)

    @cached_property
    def _opening(self) -> str:
        """Text that opens a turn of the assistant."""
        return self.prompt([_USER]).removeprefix(self._text([_USER]))

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
        except TEMPLATE_ERRORS:
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


def _lost(message: Mapping[str, Any], opened: str, said: str) -> str:
    """Return a description of the part of a message that its rendered text lacks; empty if the text is complete."""
    content, text = letters(_unopened(str(message["content"]), opened)), letters(said)
    before, found, after = text.rpartition(content) if content else ("", "", text)
    if content and not found:
        return f"the words {str(message['content'])!r:.40}"
    rest = before + after
    if any(letters(str(message[name])) not in rest for name in REASONING if message.get(name)):
        return "the reasoning"
    called = [str(call["function"]["name"]) for call in message.get("tool_calls") or ()]
    return "" if all(letters(name) in rest for name in called) else "the calls of tools"


def _with_thinking(message: Mapping[str, Any], opens: tuple[str, str] | None) -> str | None:
    """Return an answer with its thinking as the policy writes both, for templates that drop the thinking.

    Args:
      opens: Tags of the thinking that the prompt opens; None if it opens none.
    """
    text = str(message["content"])
    thought = next((str(message[name]) for name in REASONING if message.get(name)), None)
    if message.get("tool_calls") or (thought is not None and opens is None):
        return None
    if thought is not None and opens is not None:
        return f"{thought.strip()}\n{opens[1]}\n\n{text}"
    if not any(end in text for _, end in THINKING):
        return None
    return _unopened(text, opens[0] if opens else "")


def _unopened(text: str, opened: str) -> str:
    """Return an answer without the tag of thinking at its beginning, if the prompt has written the tag."""
    tags = (begin for begin, _ in THINKING if opened.rstrip().endswith(begin) and text.lstrip().startswith(begin))
    tag = next(tags, None)
    return text if tag is None else text.lstrip().removeprefix(tag).lstrip("\n")


def _continued(chat: Chat) -> bool:
    """Return True if a prompt ends with an assistant message, which the policy continues."""
    return bool(chat) and chat[-1].get("role") == "assistant"


def _with_text(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    return {**call, "function": {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}}
