"""Answers of OpenAI's API: whole ones, and events of a stream."""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from transformers import PreTrainedTokenizerBase

from jaxrlhf.engine import Completion
from jaxrlhf.episode import Reply

CHAT, CHUNK, TEXT = "chat.completion", "chat.completion.chunk", "text_completion"


def finish_reason(completion: Completion, reply: Reply | None = None) -> str:
    """OpenAI's word for how a choice ended; one that was cut has never "stopped"."""
    if completion.truncated:
        return "length"
    return "tool_calls" if reply is not None and reply.calls else "stop"


def said(reply: Reply, stop: str | None) -> str:
    """Content of a reply before the stop text that ended it; a call that cannot be made is shown as it was written."""
    content = reply.text if reply.malformed else reply.content
    return content[: content.index(stop)] if stop is not None and stop in content else content


def tool_calls(reply: Reply, key: int, *, delta: bool = False) -> list[dict[str, Any]]:
    """Calls of a reply, whose ids are a function of the key."""
    calls = []
    for index, call in enumerate(reply.calls):
        # Nine letters or digits, as templates of Mistral's want.
        call_id = hashlib.sha256(f"{key}:{index}".encode()).hexdigest()[:9]
        arguments = json.dumps(dict(call.arguments), ensure_ascii=False).encode(errors="replace").decode()
        function = {"name": call.name, "arguments": arguments}
        calls.append({**({"index": index} if delta else {}), "id": call_id, "type": "function", "function": function})
    return calls


def message(reply: Reply, stop: str | None, key: int) -> dict[str, Any]:
    """A reply as the assistant's message."""
    calls = tool_calls(reply, key)
    content = said(reply, stop)
    answer: dict[str, Any] = {"role": "assistant", "content": content if content or not calls else None}
    if reply.reasoning:
        answer["reasoning_content"] = reply.reasoning
    return {**answer, "tool_calls": calls} if calls else answer


def chat_logprobs(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int], logps: Sequence[float]) -> dict[str, Any]:
    """Log-probabilities of a chat's tokens at the sampling temperature."""
    entries = []
    for token, logp in zip(tokens, logps, strict=True):
        text = str(tokenizer.decode([token]))
        entries.append({"token": text, "logprob": _finite(logp), "bytes": list(text.encode()), "top_logprobs": []})
    return {"content": entries, "refusal": None}


def text_logprobs(
    tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int], logps: Sequence[float], *, offset: int = 0
) -> dict[str, Any]:
    """Log-probabilities of a completion's tokens; offsets are characters of the choice's text."""
    texts = [str(tokenizer.decode([token])) for token in tokens]
    offsets = [*accumulate(map(len, texts[:-1]), initial=offset)]
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
