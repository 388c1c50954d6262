"""Answers of OpenAI's API: whole ones, and events of a stream."""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from jaxrlhf.data.tokenizer import TextBytes, TokenBytes
from jaxrlhf.engine import Completion
from jaxrlhf.episode import Reply
from jaxrlhf.serving.texts import before_stop

CHAT, CHUNK, TEXT = "chat.completion", "chat.completion.chunk", "text_completion"


def finish_reason(completion: Completion, reply: Reply | None = None) -> str:
    """OpenAI's word for how a choice ended; one that was cut has never "stopped"."""
    if completion.truncated:
        return "length"
    return "tool_calls" if reply is not None and reply.calls else "stop"


def tool_calls(reply: Reply, key: int, *, delta: bool = False) -> list[dict[str, Any]]:
    """Calls of a reply; those that were drawn without an id have one that is a function of the key."""
    calls = []
    ids: set[str] = set()
    for index, call in enumerate(reply.calls):
        # Nine letters or digits, as templates of Mistral's want.
        made = hashlib.sha256(f"{key}:{index}".encode()).hexdigest()[:9]
        call_id = call.call_id if call.call_id and call.call_id not in ids else made
        ids.add(call_id)
        arguments = json.dumps(dict(call.arguments), ensure_ascii=False).encode(errors="replace").decode()
        function = {"name": call.name, "arguments": arguments}
        calls.append({**({"index": index} if delta else {}), "id": call_id, "type": "function", "function": function})
    return calls


def message(reply: Reply, stop: str | None, key: int) -> dict[str, Any]:
    """A reply as the assistant's message."""
    calls = tool_calls(reply, key)
    content, reasoning = before_stop(reply.content, stop), before_stop(reply.reasoning, stop)
    answer: dict[str, Any] = {"role": "assistant", "content": content if content or not calls else None}
    if reasoning:
        answer["reasoning_content"] = reasoning
    return {**answer, "tool_calls": calls} if calls else answer


def chat_logprobs(
    bytes_of: TokenBytes, tokens: Sequence[int], logps: Sequence[float], *, first: bool = True
) -> dict[str, Any]:
    """Log-probabilities of a chat's tokens at the sampling temperature.

    Args:
      first: These are the first tokens of the answer.
    """
    entries = []
    for place, (token, logp) in enumerate(zip(tokens, logps, strict=True)):
        own = bytes_of.of(token, first=first and not place) or bytes_of.name(token).encode()
        entry = {"token": own.decode(errors="replace"), "logprob": _finite(logp), "bytes": list(own)}
        entries.append({**entry, "top_logprobs": []})
    return {"content": entries, "refusal": None}


class TextLogprobs:
    """Log-probabilities of a completion's tokens, as they come; offsets are characters of the choice's text.

    The parts of a character have the offset of the character.

    Args:
      prompt: Tokens that the choice goes on from.
    """

    def __init__(self, tokens: TokenBytes, prompt: Sequence[int]) -> None:
        self._tokens, self._text, self._offset = tokens, TextBytes(), 0
        self._first = all(map(tokens.is_special, prompt))

    def add(self, tokens: Sequence[int], logps: Sequence[float]) -> dict[str, Any]:
        """Log-probabilities of the tokens that come next."""
        texts, offsets = [], []
        for token in tokens:
            own = self._tokens.of(token, first=self._first)
            self._first = self._first and self._tokens.is_special(token)
            texts.append(own.decode(errors="replace"))
            offsets.append(self._offset)
            self._offset += len(self._text.add(own))
        return {
            "tokens": texts,
            "token_logprobs": [_finite(logp) for logp in logps],
            "top_logprobs": None,
            "text_offset": offsets,
        }


def event(body: Mapping[str, Any]) -> bytes:
    """A server-sent event."""
    return f"data: {json.dumps(body, ensure_ascii=False)}\n\n".encode()


DONE = b"data: [DONE]\n\n"


def _finite(logp: float) -> float:
    return logp if math.isfinite(logp) else -9999.0
