"""Rendering of messages to text and tokens by a chat template; control tokens that messages spell stay text."""

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from jaxrlhf.config import Refusal
from jaxrlhf.config.refusal import reason_of
from jaxrlhf.data.chats.message_form import MessageForm
from jaxrlhf.data.control_tokens import ControlTokens
from jaxrlhf.data.tokenizer import TEMPLATE_ERRORS, render_chat
from jaxrlhf.episode import EnvironmentFailure, Message, ToolSchema

_MARKS = str.maketrans({"\ue000": "\ufffd", "\ue001": "\ufffd"})


class ChatTemplate:
    """Chat template of a tokenizer.

    Attributes:
      form: Form in which the template takes messages.
      control: Special tokens, and other tokens of the vocabulary that the template writes, such as `<tool_call>`.
      special: Special tokens alone.

    Args:
      settings: Further variables of the template, such as `enable_thinking`.

    Raises:
      Refusal: The tokenizer has no chat template.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, settings: Mapping[str, Any] | None = None) -> None:
        if tokenizer.chat_template is None:
            raise Refusal(
                "the tokenizer has no chat template, so an episode's messages cannot be tokenized; "
                'set "chat_template" in its tokenizer_config.json, or use a GGUF file that has a template'
            )
        self.tokenizer, self.form = tokenizer, MessageForm(tokenizer)
        self.special = ControlTokens(tokenizer)
        added = (str(token) for token in tokenizer.added_tokens_decoder.values())
        self.control = ControlTokens(tokenizer, (text for text in added if text in self.form.source))
        self._settings = dict(settings or {})

    def render(self, messages: Sequence[Message], tools: Sequence[ToolSchema], *, open_reply: bool) -> str:
        """Render messages as text.

        Args:
          open_reply: True opens the assistant's turn at the end.

        Raises:
          EnvironmentFailure: The template rejects the messages.
        """
        try:
            text = render_chat(
                self.tokenizer,
                [self.form.given(message) for message in messages],
                tools=[dict(_well_formed(tool)) for tool in tools] or None,
                add_generation_prompt=open_reply,
                **self._settings,
            )
        except TEMPLATE_ERRORS as error:
            roles = ", ".join(str(message.get("role")) for message in messages)
            raise EnvironmentFailure(
                "wrong-type", f"the chat template refuses messages of the roles {roles}: {reason_of(error)}"
            ) from error
        return str(text)

    def encode(self, text: str, *, marked: bool) -> tuple[int, ...]:
        """Return the token ids of rendered text.

        Args:
          marked: True if messages spell control tokens, which `as_text` has marked.
        """
        if marked:
            return tuple(self.control.in_parts(text))
        return tuple(self.tokenizer.encode(text, add_special_tokens=False))

    def as_text(self, messages: Sequence[Message]) -> tuple[list[Message], bool]:
        """Mark the control tokens that messages spell; return the messages, and True if there are any.

        An assistant's tags, such as `</think>`, stay tags. Special tokens become text in every role.
        """
        given = [_well_formed(message) for message in messages]
        spelled = any(self.control.first_in(texts_in(message)) is not None for message in given)
        return ([self._marked(message) for message in given] if spelled else given), spelled

    def _marked(self, message: Message) -> Message:
        control = self.special if message.get("role") == "assistant" else self.control
        return {
            key: value
            if key == "role"
            else mapped(value, lambda text: control.mark(text.translate(_MARKS), place="message"))
            for key, value in message.items()
        }


def text_of(message: Message) -> str:
    """Return the text of a message, joined over its parts."""
    content = message.get("content") or ""
    return content if isinstance(content, str) else "\n".join(str(part.get("text", "")) for part in content)


def _well_formed(message: Message) -> Message:
    """Return the message with characters that can be encoded: halves of surrogate pairs become `?`."""
    return {key: mapped(value, lambda text: text.encode(errors="replace").decode()) for key, value in message.items()}


def mapped(value: Any, change: Any) -> Any:
    """Apply `change` to every text in a value, keys included."""
    match value:
        case str():
            return change(value)
        case Mapping():
            return {(change(key) if isinstance(key, str) else key): mapped(item, change) for key, item in value.items()}
        case list() | tuple():
            return [mapped(item, change) for item in value]
    return value


def texts_in(value: Any) -> list[str]:
    """Return all texts in a value, keys included."""
    match value:
        case str():
            return [value]
        case Mapping():
            return [text for pair in value.items() for item in pair for text in texts_in(item)]
        case list() | tuple():
            return [text for item in value for text in texts_in(item)]
    return []
