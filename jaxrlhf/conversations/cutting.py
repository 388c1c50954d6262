"""Truncation of long messages to a number of tokens, with a notice in their text."""

from collections.abc import Callable, Sequence

from transformers import PreTrainedTokenizerBase

from jaxrlhf.conversations.rendering import text_of
from jaxrlhf.data.control_tokens import tokenizer_of_text
from jaxrlhf.episode import Message

Tokens = tuple[int, ...]


def cut_to(
    messages: Sequence[Message],
    tokens_of: Callable[[Sequence[Message]], Tokens],
    tokenizer: PreTrainedTokenizerBase,
    most: int | None,
) -> tuple[list[Message], Tokens]:
    """Truncate the texts of messages at the end, the longest texts first.

    Args:
      tokens_of: Function from messages to tokens, including all that a template writes around them.
      most: Maximum tokens; None is no limit.

    Returns:
      The messages and their tokens; both empty if `most` is less than the template's own tokens.
    """
    tokens = tokens_of(messages)
    if most is None or len(tokens) <= most:
        return [*messages], tokens
    encode = tokenizer_of_text(tokenizer).encode
    texts = [encode(text_of(message), add_special_tokens=False, split_special_tokens=True) for message in messages]
    around = len(tokens_of([{**message, "content": ""} for message in messages]))
    for notice in ("... ({left_out} of {all} tokens left out)", "...", ""):
        budget = most - around
        while budget > 0 or (budget == 0 and not notice):
            limit = _limit([len(text) for text in texts], budget)
            cut = [_cut(*one, limit, notice, tokenizer) for one in zip(messages, texts, strict=True)]
            tokens = tokens_of(cut)
            if len(tokens) <= most:
                return cut, tokens
            budget = max(budget - (len(tokens) - most), 0) if budget else -1
    return [], ()


def _limit(lengths: Sequence[int], budget: int) -> int:
    """Return the largest number of tokens to which each text may be truncated, so that all fit into `budget`."""
    low, high = 0, max(lengths, default=0)
    while low < high:
        limit = (low + high + 1) // 2
        low, high = (limit, high) if sum(min(n, limit) for n in lengths) <= budget else (low, limit - 1)
    return low


def _cut(
    message: Message, tokens: Sequence[int], most: int, notice: str, tokenizer: PreTrainedTokenizerBase
) -> Message:
    """Return the message with the first `most` tokens of its text, and a notice of how many tokens are left out."""
    if len(tokens) <= most:
        return message
    kept = str(tokenizer.decode(list(tokens[:most]))).rstrip("\ufffd")
    return {**message, "content": kept + notice.format(left_out=len(tokens) - most, all=len(tokens))}
