"""Check for chat templates that would silently drop messages, calls or tools from a prompt."""

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

from transformers import PreTrainedTokenizerBase

from jaxrlhf.config import Refusal
from jaxrlhf.data.chats.messages import letters
from jaxrlhf.data.images import MARK
from jaxrlhf.data.tokenizer import TEMPLATE_ERRORS, render_chat

_CALL, _ANSWER = "wq7vcall", "wq7vanswer"


class ShownMessages:
    """Check that a tokenizer's chat template shows what a prompt has."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer

    def check(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], text: str, place: str
    ) -> None:
        """Raise `Refusal` if the rendered text of a prompt lacks words of its messages, calls or tools."""
        shown = letters(text)
        for message in messages:
            parts = () if message["role"] in ("assistant", "tool") else message["content"].split(MARK)
            if any(letters(part) not in shown for part in parts):
                raise Refusal(
                    f"{place}: the tokenizer's chat template leaves out the message {message['content']!r:.40} of the "
                    f"role {message['role']!r}; change the template, or give the words in a message of another role"
                )
        if any(letters(str(tool.get("function", tool).get("name"))) not in shown for tool in tools):
            raise Refusal(
                f"{place}: the tokenizer's chat template shows no tools, and 'tools' names some; describe them in the "
                "system's message"
            )
        calls = any(message.get("tool_calls") for message in messages)
        if calls and not any(_CALL in text for text in self._rendered):
            raise Refusal(
                f"{place}: the tokenizer's chat template shows no calls of tools, and a message has some; write them "
                "into its content"
            )
        answers = any(message.get("role") == "tool" for message in messages)
        if answers and not any(_ANSWER in text for text in self._rendered):
            raise Refusal(
                f"{place}: the tokenizer's chat template shows no answers of tools; give them as a user's messages"
            )

    @cached_property
    def _rendered(self) -> list[str]:
        """Renderings of a chat with a call and its answer, in each form that the template accepts."""
        return [*self._texts()]

    def _texts(self) -> Iterator[str]:
        for arguments in ({"x": 1}, json.dumps({"x": 1})):
            call = {"type": "function", "id": "call00000", "function": {"name": _CALL, "arguments": arguments}}
            chat = [
                {"role": "user", "content": "?"},
                {"role": "assistant", "content": "", "tool_calls": [call]},
                {"role": "tool", "name": _CALL, "tool_call_id": "call00000", "content": _ANSWER},
            ]
            for end in (2, 3):
                try:
                    yield str(render_chat(self._tokenizer, chat[:end]))
                except TEMPLATE_ERRORS:
                    continue  # the template does not accept this form
