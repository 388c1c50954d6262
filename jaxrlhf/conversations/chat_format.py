"""Chat format of one tokenizer: tokens of first prompts and of messages after a reply, and parsing of replies."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from jaxrlhf.conversations.rendering import ChatTemplate, text_of
from jaxrlhf.conversations.reply_parser import ReplyParser
from jaxrlhf.conversations.reply_stream import ReplyWords
from jaxrlhf.conversations.synthetic_chat import SyntheticChat
from jaxrlhf.data.chats.message_form import answers_as_users
from jaxrlhf.data.images import ImageReader
from jaxrlhf.episode import EnvironmentFailure, Message, Reply, ToolSchema

_OPENING_TOKENS = 16


class ChatFormat:
    """Format in which a tokenizer writes chats, shared by all episodes of a run.

    Attributes:
      stop_tokens: Token ids that end a turn of the policy.
      end_of_turn: Token id that closes a truncated turn; None if the next message's header closes it.

    Args:
      settings: Further variables of the chat template, such as `{"enable_thinking": False}`.
      reader: Reader of images in messages; None supports text alone.

    Raises:
      Refusal: The tokenizer has no chat template, or the template does not show replies.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        settings: Mapping[str, Any] | None = None,
        reader: ImageReader | None = None,
    ) -> None:
        self.tokenizer, self.reader = tokenizer, reader
        self.template = ChatTemplate(tokenizer, settings)
        self.synthetic = SyntheticChat(self.template)
        self.end_of_turn = self.synthetic.after_words.token
        self.stop_tokens = self._stop_tokens()
        self._parser = ReplyParser(tokenizer, self.template.form.source, self.synthetic.opening())
        self._keeps = {
            (of_tool, reasoning): self.synthetic.keeps(messages, reasoning=reasoning)
            for of_tool, messages in ((False, _USER), (True, self.template_messages(self.synthetic.answers())))
            for reasoning in (False, True)
        }

    @property
    def family(self) -> str:
        """Name of the form in which tool calls are parsed."""
        return self._parser.family

    def prompt(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSchema] = (),
        *,
        rewritten: Callable[[str], str] = lambda text: text,
    ) -> tuple[int, ...]:
        """Return the token ids of a chat, with the assistant's turn opened at the end.

        Args:
          rewritten: Function applied to the rendered text before tokenization; it inserts placeholders of images.

        Raises:
          EnvironmentFailure: The template rejects the messages.
        """
        given, spelled = self.template.as_text(self.template_messages(messages))
        text = self.template.render(given, tools, open_reply=True)
        _check_shown(given, text)
        return self.template.encode(rewritten(text), marked=spelled)

    def delta(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSchema] = (),
        *,
        ended_by: int | None,
        rewritten: Callable[[str], str] = lambda text: text,
    ) -> tuple[int, ...]:
        """Return the token ids that follow a sampled reply.

        The ids are an end of turn if the reply has none, the separator after the turn, the messages, and the opening of
        the next turn. The time depends on the length of the messages, not of the conversation.

        Args:
          ended_by: Last token of the reply if it is a stop token; None if the reply was truncated.
          rewritten: Function applied to the rendered text, as in `prompt`.

        Raises:
          EnvironmentFailure: The template rejects the messages.
        """
        given, spelled = self.template.as_text(self.template_messages(messages))
        text = self.synthetic.following(given, tools)
        _check_shown(given, text)
        text = rewritten(text)
        ids = self.template.encode(text, marked=spelled)
        closing = self.synthetic.closing(given)
        if closing.token is None:  # the next header ends the turn: `<|user|>` of GLM
            return ids[1:] if ids[:1] == (ended_by,) else ids
        # Gemma 4 ends a call with the token that opens the answer.
        first = next(self.template.special.found_in(text.lstrip()), None)
        if ended_by is None or (ended_by != closing.token and (first is None or first.start() > 0)):
            return (closing.token, *ids)
        return ids

    def keeps(self, messages: Sequence[Message], *, reasoning: bool) -> bool:
        """Return True if the template renders all text before these messages as it was before.

        Args:
          reasoning: True if the policy has reasoned before.
        """
        of_tool = all(message.get("role") == "tool" for message in messages)
        return self._keeps[of_tool, False] and (not reasoning or self._keeps[of_tool, True])

    def opening(self, tokens: Sequence[int]) -> str:
        """Return the end of the text of these tokens, which shows if the template has opened a reply's reasoning."""
        return str(self.tokenizer.decode(list(tokens[-_OPENING_TOKENS:]), skip_special_tokens=False))

    def parse(self, tokens: Sequence[int], tools: Sequence[ToolSchema] = (), *, opening: str = "") -> Reply:
        """Parse a reply that the policy sampled; any tokens are valid.

        Args:
          opening: Result of `opening` for the tokens before the reply.
        """
        ended = bool(tokens) and tokens[-1] in self.stop_tokens
        return self._parser.reply(tuple(tokens), tools, ended=ended, opening=opening)

    def stream(self, tools: Sequence[ToolSchema] = (), *, opening: str = "") -> ReplyWords | None:
        """Return an incremental parser of a reply; its text is a prefix of the text that `parse` finds.

        Returns:
          None if the tokenizer's own response template needs the whole reply.
        """
        return self._parser.stream(tools, opening)

    def check_tools(self, tools: Sequence[ToolSchema]) -> None:
        """Raise `Refusal` if calls of these tools could not be parsed, as `Signatures` does."""
        self._parser.signatures(tools)

    def reply_message(self, reply: Reply) -> Message:
        """Return the reply as a message that this template shows, in the form of `template_messages`."""
        if self.synthetic.with_calls or self._parser.writes_calls or not reply.calls:
            return reply.message
        return {"role": "assistant", "content": reply.text, "reasoning_content": reply.reasoning}

    def template_messages(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Return the messages in the form that the template takes.

        If the template does not show tool messages, they become user messages, joined with the user messages around
        them. If it does not show calls, they become text of the assistant, as the policy writes them.

        Raises:
          EnvironmentFailure: The template shows no calls, and the family's form of calls cannot be written as text.
        """
        if self.synthetic.tool_role != "tool":
            messages = answers_as_users(messages)
        return messages if self.synthetic.with_calls else [self._with_calls_as_text(message) for message in messages]

    def _with_calls_as_text(self, message: Message) -> Message:
        calls = message.get("tool_calls")
        if not calls:
            return message
        try:
            text = self._parser.written(calls)
        except (TypeError, KeyError, ValueError, AttributeError) as error:
            raise EnvironmentFailure("wrong-type", f"the 'tool_calls' of a message are no calls: {error}") from error
        if text is None:
            raise EnvironmentFailure(
                "wrong-type",
                f"the chat template shows no calls, and calls of the form {self.family} cannot be written as text",
            )
        content = "\n".join(part for part in (text_of(message), text) if part)
        return {**{key: value for key, value in message.items() if key != "tool_calls"}, "content": content}

    def _stop_tokens(self) -> frozenset[int]:
        """Return the tokens that end turns in the template, or the headers that follow a turn, and the EOS token."""
        found = {self.tokenizer.eos_token_id, self.synthetic.after_words.token, self.synthetic.after_calls.token}
        for messages in (_USER, self.synthetic.answers()):
            if self.synthetic.closing(messages).token is None:
                header = next(self.template.special.found_in(self.synthetic.following(messages, ())), None)
                found |= {self.template.special.ids[header[0]]} if header else set()
        found |= {id for text, id in self.template.special.ids.items() if text == "<|eom_id|>"}  # of Llama 3's calls
        return frozenset(found - {None})


def _check_shown(messages: Sequence[Message], text: str) -> None:
    """Raise `EnvironmentFailure` if the template drops a system message, as gpt-oss's does after the first one."""
    end = 0  # of the system message before; a search from the beginning for each would take quadratic time
    for place, message in enumerate(messages):
        if message.get("role") != "system":
            continue
        content = text_of(message).strip()
        if (start := text.find(content, end)) < 0 and (start := text.find(content)) < 0:
            raise EnvironmentFailure(
                "wrong-type",
                f"the chat template leaves out the system message {content[:40]!r} at place {place}; send its text in "
                "the first message, or as a user message",
            )
        end = start + len(content)


_USER: list[Message] = [{"role": "user", "content": "?"}]
