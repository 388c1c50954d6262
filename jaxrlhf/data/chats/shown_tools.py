"""Check for chat templates that would silently drop tool calls or tool messages from a prompt."""

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

from transformers import PreTrainedTokenizerBase

from jaxrlhf.config import Refusal
from jaxrlhf.data.tokenizer import TEMPLATE_ERRORS, render_chat

_CALL, _ANSWER = "wq7vcall", "wq7vanswer"


class ShownTools:
    """Support of a tokenizer's chat template for tool calls and tool messages."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer

    def check(self, messages: Sequence[Mapping[str, Any]], place: str) -> None:
        """Raise `Refusal` if the template drops tool calls or tool messages of a prompt."""
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
