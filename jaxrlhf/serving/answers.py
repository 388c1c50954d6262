"""Answers of OpenAI's API: complete answers, and stream events."""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from jaxrlhf.data.tokenizer import TokenBytes
from jaxrlhf.engine import Completion
from jaxrlhf.episode import Reply
from jaxrlhf.serving.texts import TextStream, before_stop

Likely = Sequence[tuple[int, float]]
"""Ids of likely tokens, the likeliest first, with their log-probabilities."""

CHAT, CHUNK, TEXT = "chat.completion", "chat.completion.chunk", "text_completion"


def finish_reason(completion: Completion, reply: Reply | None = None) -> str:
    """Return OpenAI's `finish_reason` of a choice; a truncated choice is always "length"."""
    if completion.truncated:
        return "length"
    return "tool_calls" if reply is not None and reply.calls else "stop"


def tool_calls(reply: Reply, key: int, *, delta: bool = False) -> list[dict[str, Any]]:
    """Return the tool calls of a reply; a call without an id, or with a repeated id, gets an id made from `key`."""
    calls = []
    ids: set[str] = set()
    for index, call in enumerate(reply.calls):
        call_id = call.call_id
        if not call_id or call_id in ids:  # nine letters or digits, as Mistral's templates require
            call_id = hashlib.sha256(f"{key}:{index}".encode()).hexdigest()[:9]
        ids.add(call_id)
        arguments = json.dumps(dict(call.arguments), ensure_ascii=False).encode(errors="replace").decode()
        function = {"name": call.name, "arguments": arguments}
        calls.append({**({"index": index} if delta else {}), "id": call_id, "type": "function", "function": function})
    return calls


def message(reply: Reply, stop: str | None, key: int) -> dict[str, Any]:
    """Return a reply as the assistant's message."""
    calls = tool_calls(reply, key)
    content, reasoning = before_stop(reply.content, stop), before_stop(reply.reasoning, stop)
    answer: dict[str, Any] = {"role": "assistant", "content": content if content or not calls else None}
    if reasoning:
        answer["reasoning_content"] = reasoning
    return {**answer, "tool_calls": calls} if calls else answer


class ChatLogprobs:
    """Stream of the log-probabilities of a chat's reply, at the sampling temperature."""

    def __init__(self, tokens: TokenBytes) -> None:
        self._tokens, self._first = tokens, True

    def add(
        self, tokens: Sequence[int], logps: Sequence[float], likely: Sequence[Likely] | None = None
    ) -> dict[str, Any]:
        """Return the log-probabilities of the next tokens.

        Args:
          likely: Likeliest tokens in each token's place; None gives none.
        """
        entries = []
        for place, (token, logp) in enumerate(zip(tokens, logps, strict=True)):
            others = [self._entry(*other) for other in (likely[place] if likely is not None else ())]
            entries.append({**self._entry(token, logp), "top_logprobs": others})
            self._first = False
        return {"content": entries, "refusal": None}

    def _entry(self, token: int, logp: float) -> dict[str, Any]:
        text = self._tokens.of(token, first=self._first) or self._tokens.name(token).encode()
        return {"token": text.decode(errors="replace"), "logprob": _finite(logp), "bytes": list(text)}


class TextLogprobs:
    """Stream of the log-probabilities of a completion; offsets count characters of the choice's text.

    All tokens of one character have the offset of the character. A token that is no valid text is written as its bytes,
    such as `bytes:\\xe6`, and a control token as the vocabulary writes it.

    Args:
      prompt: Tokens before the choice.
    """

    def __init__(self, tokens: TokenBytes, prompt: Sequence[int]) -> None:
        self._tokens, self._text, self._offset = tokens, TextStream(tokens, (), prompt), 0

    def add(
        self, tokens: Sequence[int], logps: Sequence[float | None], likely: Sequence[Likely] | None = None
    ) -> dict[str, Any]:
        """Return the log-probabilities of the next tokens; None is the log-probability of a token after no other.

        Args:
          likely: Likeliest tokens in each token's place; None gives none.
        """
        texts, offsets = [], []
        others: list[dict[str, float] | None] = []
        for place, (token, logp) in enumerate(zip(tokens, logps, strict=True)):
            texts.append(self._written(token))
            if likely is not None and logp is not None:
                named = [*likely[place], (token, logp)]
                others.append({self._written(name): _finite(value) for name, value in reversed(named)})
            else:
                others.append(None)
            offsets.append(self._offset)
            self._offset += len(self._text.add([token]))
        return {
            "tokens": texts,
            "token_logprobs": [None if logp is None else _finite(logp) for logp in logps],
            "top_logprobs": None if likely is None else others,
            "text_offset": offsets,
        }

    def _written(self, token: int) -> str:
        text = self._tokens.of(token, first=self._text.at_start) or self._tokens.name(token).encode()
        try:
            return text.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in text)


def event(body: Mapping[str, Any]) -> bytes:
    """Encode a server-sent event."""
    return f"data: {json.dumps(body, ensure_ascii=False)}\n\n".encode()


DONE = b"data: [DONE]\n\n"


def _finite(logp: float) -> float:
    return logp if math.isfinite(logp) else -9999.0
