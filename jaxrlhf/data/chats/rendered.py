"""Chats of records rendered by a tokenizer's chat template: prompts, and answers that are messages."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple, cast

from transformers import PreTrainedTokenizerBase

from jaxrlhf.config import Refusal
from jaxrlhf.config.refusal import reason_of
from jaxrlhf.data.chats.message_form import PROBE, USER, MessageForm, answers_as_users, as_object
from jaxrlhf.data.chats.messages import REASONING, letters
from jaxrlhf.data.control_tokens import ControlTokens
from jaxrlhf.data.images import MARK
from jaxrlhf.data.tokenizer import TEMPLATE_ERRORS, render_chat

THINKING = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))
"""Opening and closing tags of thinking in the text of an answer."""

Chat = Sequence[Mapping[str, Any]]
Schemas = Sequence[Mapping[str, Any]]


class Segment(NamedTuple):
    """Part of an answer as the template renders it.

    Attributes:
      imitated: True for text of the assistant; only such segments are imitated in training.
    """

    text: str
    imitated: bool


class RenderedChats:
    """Chats rendered by a tokenizer's chat template.

    Args:
      control: The tokenizer's special tokens.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, control: ControlTokens) -> None:
        self._tokenizer, self._control, self._form = tokenizer, control, MessageForm(tokenizer)

    def prompts(self, chats: Sequence[Chat], tools: Sequence[Schemas]) -> list[str]:
        """Render each chat with the assistant's turn opened at the end; a final assistant message is left open."""
        if not any(tools) and not any(_continued(chat) for chat in chats):
            given = [self._given(chat) for chat in chats]
            return cast(list[str], render_chat(self._tokenizer, given, add_generation_prompt=True))
        return [self._prompt(chat, schemas) for chat, schemas in zip(chats, tools, strict=True)]

    def check_shown(self, chat: Chat, tools: Schemas, text: str, place: str) -> None:
        """Raise `Refusal` if the rendered text of a prompt lacks words of its messages, calls or tools."""
        rendered = letters(text)
        for message in chat:
            parts = () if message["role"] in ("assistant", "tool") else message["content"].split(MARK)
            if any(letters(part) not in rendered for part in parts):
                raise Refusal(
                    f"{place}: the tokenizer's chat template leaves out the message {message['content']!r:.40} of the "
                    f"role {message['role']!r}; change the template, or give the words in a message of another role"
                )
        if any(letters(str(tool.get("function", tool).get("name"))) not in rendered for tool in tools):
            raise Refusal(
                f"{place}: the tokenizer's chat template shows no tools, and the record has 'tools'; describe them in "
                "the system message"
            )
        if not self._form.shows_calls and any(message.get("tool_calls") for message in chat):
            raise Refusal(
                f"{place}: the tokenizer's chat template shows no calls of tools, and a message has some; write them "
                "into its content"
            )
        if not self._form.shows_answers and any(message["role"] == "tool" for message in chat):
            raise Refusal(
                f"{place}: the tokenizer's chat template shows no answers of tools; give them as user messages"
            )

    def answer(self, prompt: Chat, answer: str | Chat, tools: Schemas = (), *, place: str) -> list[Segment]:
        """Render an answer after the prompt, split into segments; the last segment ends with an end-of-turn token.

        Each message of the assistant is learned as the template writes it when it is the last message. If the template
        writes earlier messages differently, they are learned as written in the whole chat.

        Raises:
          Refusal: The template rejects the messages, drops a part of an answer, or renders the prompt differently.
        """
        try:
            if isinstance(answer, str):
                if _continued(prompt):
                    return [Segment(answer + self._end, True)]
                answer = [{"role": "assistant", "content": answer}]
            return self._segments(prompt, answer, tools, place)
        except TEMPLATE_ERRORS as error:
            if isinstance(error, Refusal):
                raise
            raise Refusal(f"{place}: the tokenizer's chat template refuses this answer: {reason_of(error)}") from error

    def _segments(self, prompt: Chat, answer: Chat, tools: Schemas, place: str) -> list[Segment]:
        chat = [*prompt, *answer]
        turns = [n for n in range(len(prompt), len(chat)) if chat[n]["role"] == "assistant"]
        if any(_continued(chat[:n]) for n in turns):
            raise Refusal(
                f"{place}: an assistant message of the answer follows another assistant message; join the two, and "
                "give the answer as a text if the prompt ends with an assistant message"
            )
        opened = [self._prompt(chat[:n], tools) for n in turns]
        segments: list[Segment] = []
        for n, before, after in zip(turns, opened, [*opened[1:], None], strict=True):
            turn = self._last(chat[: n + 1], tools, before, place)
            if after is not None and not after.startswith(before + turn):
                turn = self._earlier(chat[n], tools, turn, before, after, place)
            segments.append(Segment(turn, True))
            if after is not None:
                segments.append(Segment(after[len(before + turn) :], False))
        return segments

    def _last(self, chat: Chat, tools: Schemas, opened: str, place: str) -> str:
        """Return the last message of a chat as the template writes it after `opened`, up to the end of its turn."""
        message, turn = chat[-1], self._turn_after(opened, self._text(chat, tools))
        if turn is None and opened.endswith(self._opening):
            # A final answer makes gpt-oss's template drop earlier reasoning, so the answer is cut from a shorter chat.
            turn = self._turn_after(self._prompt([USER], tools), self._text([USER, message], tools))
        lost = _lost(message, tools, opened, turn) if turn is not None else ""
        if turn is not None and not lost:
            return turn
        opens = next((pair for pair in THINKING if opened.rstrip().endswith(pair[0])), None)
        thinking = _with_thinking(message, opens)
        if thinking is not None:
            return thinking + self._end
        if not lost:
            begins = f"opens {opens[0]!r} in it" if opens else f"opens it with {opened[-20:]!r}"
            raise Refusal(
                f"{place}: the chat template does not write an answer after the text that opens the assistant's turn, "
                f"and {begins}, so the answer would be learned there; give the answer with its thinking, "
                "'...</think>...', or change the template"
            )
        raise Refusal(
            f"{place}: the tokenizer's chat template leaves out {lost} of an answer; remove that part from the record, "
            "or use a tokenizer whose template writes it"
        )

    def _earlier(
        self, message: Mapping[str, Any], tools: Schemas, last: str, opened: str, later: str, place: str
    ) -> str:
        """Return a message as the template writes it in `later`, where more messages follow.

        Args:
          last: Text of the message as the last one. The texts may differ by the empty thinking at the beginning, which
            Qwen3's template leaves out of earlier turns.
        """
        text, end, _ = later.removeprefix(opened).partition(self._end)
        lost = _lost(message, tools, opened, text)
        if later.startswith(opened) and end and last.endswith(text + end) and not lost:
            return text + end
        raise Refusal(
            f"{place}: the chat template writes an earlier turn of the assistant differently if messages follow"
            f"{f', without {lost}' if lost else ''}, so the policy would learn another text than it sees later; write "
            "one record for each answer, with the earlier turns in the prompt"
        )

    def _turn_after(self, opened: str, whole: str) -> str | None:
        """Return the turn after `opened`, with EOS if it has no end; None if the text does not begin with `opened`."""
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
        return self._text([USER, {"role": "assistant", "content": PROBE}]).rpartition(PROBE)[2]

    @cached_property
    def _closing(self) -> str:
        """Special token that ends a turn of the assistant; empty if there is none."""
        later = self._text([USER, {"role": "assistant", "content": PROBE}, USER]).rpartition(PROBE)[2]
        found = self._control.closing(self._after, later)
        return found[-1][0] if found else ""

    @property
    def _end(self) -> str:
        return self._closing or str(self._tokenizer.eos_token)

    @cached_property
    def _opening(self) -> str:
        """Text that opens a turn of the assistant."""
        return self._prompt([USER]).removeprefix(self._text([USER]))

    def _prompt(self, chat: Chat, tools: Schemas = ()) -> str:
        how = {"continue_final_message": True} if _continued(chat) else {"add_generation_prompt": True}
        return self._text(chat, tools, **how)

    def _text(self, chat: Chat, tools: Schemas = (), **how: Any) -> str:
        return str(render_chat(self._tokenizer, self._given(chat), tools=[*tools] or None, **how))

    def _given(self, chat: Chat) -> list[dict[str, Any]]:
        chat = chat if self._form.shows_answers else answers_as_users(chat)
        return [self._form.given(message) for message in chat]


def _lost(message: Mapping[str, Any], tools: Schemas, opened: str, rendered: str) -> str:
    """Return a description of the part of a message that its rendered text lacks; empty if the text is complete."""
    content, text = letters(_unopened(str(message["content"]), opened)), letters(rendered)
    before, found, after = text.rpartition(content) if content else ("", "", text)
    if content and not found:
        return f"the words {str(message['content'])!r:.40}"
    rest = before + after
    if any(letters(str(message[name])) not in rest for name in REASONING if message.get(name)):
        return "the reasoning"
    for function in (call["function"] for call in message.get("tool_calls") or ()):
        words: list[Any] = [function["name"]]
        if len(tools) == 1:  # the embedded template then writes the arguments alone
            words += as_object(function["arguments"]).values() or [""]
        if not any(letters(str(word)) in rest for word in words):
            return "the calls of tools"
    return ""


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
