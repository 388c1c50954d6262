"""Contents of slots: which tokens have their keys and values in the cache, for prompts that begin alike."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxrlhf.engine.sequence import SequenceState


class Known(NamedTuple):
    """The longest beginning of a prompt whose keys and values are in a slot; 0 tokens if there is none."""

    tokens: int
    slot: int


class _Content(NamedTuple):
    request_id: int
    token_S: np.ndarray


class Contents:
    """Tokens in the cache, slot by slot, of requests with `keep`.

    They outlive the response, until another takes the slot; slots that became free first are taken first.

    Args:
      reusable: Prompts can go on from what a slot holds. A state is one of the slot's last token, and none before it,
        so that with layers that have states every prompt is run whole.
    """

    def __init__(self, *, slots: int, reusable: bool = True) -> None:
        self._slots, self._reusable = slots, reusable
        self._content: dict[int, _Content] = {}

    @property
    def length_B(self) -> np.ndarray:
        """Tokens kept in each slot, in use or not."""
        length_B = np.zeros(self._slots, np.int64)
        for slot, content in self._content.items():
            length_B[slot] = len(content.token_S)
        return length_B

    def start(self, slot: int, sequence: SequenceState) -> None:
        """A sequence takes the slot; its prompt is there."""
        self._content.pop(slot, None)
        if sequence.request.keep and self._reusable:
            prompt_S = np.asarray(sequence.request.prompt_tokens, np.int32)
            self._content[slot] = _Content(sequence.request.request_id, prompt_S)

    def end(self, slot: int, sequence: SequenceState) -> None:
        """The sequence of the slot ended; all its tokens but the last were run."""
        if slot in self._content:
            content = self._content[slot]
            drawn_S = np.asarray(sequence.tokens[:-1], np.int32)
            self._content[slot] = content._replace(token_S=np.concatenate([content.token_S, drawn_S]))

    def release(self, request_id: int) -> None:
        """Forget what is kept of a request."""
        self._content = {slot: content for slot, content in self._content.items() if content.request_id != request_id}

    def kind(self, sequence: SequenceState) -> int:
        """Bits of the number of known tokens: prompts go on together that have about as much behind them."""
        return self.longest(sequence.request.prompt_tokens).tokens.bit_length()

    def longest(self, prompt: Sequence[int]) -> Known:
        """The longest known beginning of a prompt, without its last token, which is run to predict the next."""
        prompt_S = np.asarray(prompt[:-1], np.int32)
        best = Known(0, 0)
        for slot, (_, token_S) in self._content.items():
            shorter = min(len(token_S), len(prompt_S))
            if shorter > best.tokens:
                differs = np.flatnonzero(token_S[:shorter] != prompt_S[:shorter])
                best = max(best, Known(int(differs[0]) if len(differs) else shorter, slot))
        return best
