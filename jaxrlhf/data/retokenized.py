"""Responses in the tokens of another model, aligned by text with the policy's tokens."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerBase

from jaxrlhf.batch import Problem
from jaxrlhf.config import Refusal
from jaxrlhf.data.tokenizer import decoder, pieces_of, render_chat

NO_SPAN = -1
_NO_CHARACTER = "\ufffd"


class Aligned(NamedTuple):
    """Response in the tokens of another tokenizer, aligned with the policy's tokens.

    A span is a shortest stretch of text that begins and ends at a token boundary of both tokenizers.

    Attributes:
      tokens: Token ids of the other tokenizer, with its EOS if the response ended with EOS.
      span_S: Span of each of the policy's tokens, counted from 0; `NO_SPAN` after the last common boundary, and from
        the first bytes that are no character.
      span_T: Span of each of the other tokenizer's tokens.
    """

    tokens: list[int]
    span_S: np.ndarray
    span_T: np.ndarray

    def sums(self, logp_T: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the span of each of the policy's tokens, and the sum of the other model's log-probabilities over it.

        Args:
          logp_T: Log-probabilities of the first tokens of `tokens`; a span that extends beyond them becomes `NO_SPAN`.
        """
        count = len(logp_T)
        whole = self.span_T[count] if count < len(self.span_T) else NO_SPAN
        spans = int(self.span_T.max(initial=NO_SPAN)) + 1 if whole == NO_SPAN else int(whole)
        inside_T = (self.span_T[:count] >= 0) & (self.span_T[:count] < spans)
        sums = np.bincount(self.span_T[:count][inside_T], weights=logp_T[inside_T], minlength=spans + 1)
        span_S = np.where(self.span_S < spans, self.span_S, NO_SPAN)
        return span_S, np.where(span_S == NO_SPAN, 0.0, sums[span_S])

    def partner_S(self) -> np.ndarray:
        """Return for each policy token the index in `tokens` of the token with the same text; `NO_SPAN` without one."""
        partner_S = np.full(len(self.span_S), NO_SPAN)
        count_S, count_T = (np.bincount(one[one >= 0], minlength=1) for one in (self.span_S, self.span_T))
        alone = [span for span, count in enumerate(count_S) if count == count_T[span] == 1]
        for span in alone:
            partner_S[self.span_S == span] = np.flatnonzero(self.span_T == span)
        return partner_S


class Retokenizer:
    """Conversion of a policy's prompts and responses to the tokens of another model.

    Args:
      other: Tokenizer of the other model; its chat template renders the prompts.

    Raises:
      Refusal: The other tokenizer does not report the offsets of tokens in a text.
    """

    def __init__(self, policy: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase) -> None:
        if not other.is_fast:
            raise Refusal(
                f"{type(other).__name__} does not say where in a text its tokens are; give a model that has a "
                "tokenizer.json"
            )
        self._decode, self._special, self._other = decoder(policy), frozenset(policy.all_special_ids), other
        self._policy = policy
        self._own_id: dict[int, int] | None = None

    def prompt(self, problem: Problem) -> list[int]:
        """Return the token ids of a prompt: its messages in the other chat template; without either, its text."""
        if self._other.chat_template is None or not problem.messages:
            return self._ids(problem.prompt, special=True)[0]
        messages = [dict(message) for message in problem.messages]
        return self._ids(str(render_chat(self._other, messages, add_generation_prompt=True)), special=False)[0]

    def response(self, tokens: Sequence[int], *, finished: bool) -> Aligned:
        """Return the response in the other model's tokens, aligned with the policy's.

        Args:
          finished: False if a limit truncated the response, so that it has no EOS.
        """
        ends = finished and bool(tokens) and tokens[-1] in self._special
        said = list(tokens[:-1] if ends else tokens)
        pieces = pieces_of(said, self._decode)
        # Another model cannot score bytes of half a character, so the response is truncated before them.
        pieces = pieces[: next((index for index, piece in enumerate(pieces) if _NO_CHARACTER in piece), len(pieces))]
        ends = ends and len(pieces) == len(said)
        ids, end_T = self._ids("".join(pieces), special=False)
        # A policy token without text belongs to the token that completes its character. The other tokenizer reports
        # the end of the character as the end of each of the character's tokens.
        place_S = np.cumsum([len(piece) for piece in pieces], dtype=int)
        cuts_S = {int(place): index for index, place in reversed([*enumerate(place_S)]) if pieces[index]}
        cuts_T = {int(place): index for index, place in enumerate(end_T)}
        shared = sorted(cuts_S.keys() & cuts_T.keys())
        span_S = _spans([cuts_S[place] for place in shared], len(tokens))
        span_T = _spans([cuts_T[place] for place in shared], len(ids))
        if ends:  # the EOS tokens of both form a span of their own
            ids, span_S[-1], span_T = [*ids, self._other.eos_token_id], len(shared), np.append(span_T, len(shared))
        return Aligned(ids, span_S, span_T)

    def own_id_V(self, vocab: int) -> np.ndarray:
        """Return for each id of the other model the policy's id of the same text, -1 without one; int32, `[vocab]`."""
        if self._own_id is None:
            own, other = _ids_by_text(self._policy), _ids_by_text(self._other)
            self._own_id = {other[text]: own[text] for text in other.keys() & own.keys()}
        own_id_V = np.full(vocab, -1, np.int32)
        for theirs, ours in self._own_id.items():
            own_id_V[theirs] = ours
        return own_id_V

    def _ids(self, text: str, *, special: bool) -> tuple[list[int], list[int]]:
        """Return the token ids of a text, and the offset in the text at which each token ends."""
        encoded = self._other(text, add_special_tokens=special, return_offsets_mapping=True)
        return list(encoded["input_ids"]), [end for _, end in encoded["offset_mapping"]]


def _spans(last: Sequence[int], count: int) -> np.ndarray:
    """Return the span of each of `count` tokens, from the index of the last token of each span."""
    span = np.searchsorted(np.asarray(last, int), np.arange(count))
    return np.where(span < len(last), span, NO_SPAN)


def _ids_by_text(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    """Return token ids by their text in the middle of a text, without half characters; the empty text is EOS."""
    # Decode after another token, because a tokenizer may decode the first token of a text differently.
    [before] = tokenizer.encode("a", add_special_tokens=False)[-1:]
    start = len(tokenizer.decode([before]))
    texts = tokenizer.batch_decode([[before, token] for token in range(len(tokenizer))], skip_special_tokens=True)
    ids = {text[start:]: token for token, text in enumerate(texts) if _NO_CHARACTER not in text}
    return ids | {"": int(tokenizer.eos_token_id)}
