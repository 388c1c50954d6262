"""Prefix cache: the tokens whose keys and values each slot holds, so that prompts with the same prefix reuse them."""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from jaxrlhf.engine.buckets import RING_STEP, Shape, ring_behind
from jaxrlhf.engine.sequence import SequenceState
from jaxrlhf.models.causal_lm import AnyModel
from jaxrlhf.models.config import ModelConfig


class PrefixMatch(NamedTuple):
    """Longest prefix of a prompt whose keys and values are in a slot; 0 tokens if there is none."""

    tokens: int
    slot: int


class Ring(NamedTuple):
    """Ring sizes of the cache of sliding-window layers.

    Attributes:
      entries: Number of positions that a slot keeps.
      window: Number of positions that a token attends to, itself included.
      ahead: Maximum number of tokens that in-flight dispatches may have written after the last token of an ended
        response.
    """

    entries: int
    window: int
    ahead: int


class _Content(NamedTuple):
    """Tokens whose keys and values a slot holds.

    Attributes:
      used: Number of the last use, from 1; 0 if the slot may be taken first.
      parked: True once the response has ended.
      digest: Hash of all tokens of an ended response.
      first: First position that a ring may hold; entries of earlier positions are overwritten.
    """

    request_id: int
    token_S: np.ndarray
    used: int
    parked: bool
    digest: int = 0
    first: int = 0

    def begins(self, prompt_S: np.ndarray) -> bool:
        """Return True if the response has ended and the prompt starts with all of its tokens."""
        return self.parked and bool(np.array_equal(self.token_S, prompt_S[: len(self.token_S)]))


def reusable(config: AnyModel) -> bool:
    """Return True if prompts can reuse the cached prefix of a slot; False if every prompt is run whole.

    A linear-attention state exists only for the slot's last token. Images with bidirectional attention cannot be split.
    """
    return config.linear is None and not (config.vision is not None and config.vision.both_ways)


class PrefixCache:
    """Prefix cache over slots: the cached tokens of requests with `keep`.

    The tokens outlive the response until another response takes the slot. Slots without content are taken first, then
    the least recently used slots. A request with the same prefix counts as a use.

    Rings keep only the newest positions of a slot. A prompt can continue an ended response only if it leaves out little
    of the response's end. Further back, the window of the prompt's first new token is overwritten, and the prompt is
    run whole.

    Args:
      reusable: True if prompts can reuse the prefix that a slot holds.
      ring: Ring sizes of sliding-window layers; None if all layers keep all positions.
    """

    def __init__(self, *, slots: int, reusable: bool = True, ring: Ring | None = None) -> None:
        self._slots, self._reusable, self.ring = slots, reusable, ring
        self._content: dict[int, _Content] = {}
        self._whole: dict[int, int] = {}  # slots of ended responses, by the digest of all their tokens
        self._uses = 0

    def used(self, slot: int) -> int:
        """Return the number of a slot's last use, from 1; 0 if its content is empty or will be in another slot too."""
        return self._content[slot].used if slot in self._content else 0

    @property
    def length_B(self) -> np.ndarray:
        """Number of cached tokens of each slot, in use or not."""
        length_B = np.zeros(self._slots, np.int64)
        for slot, content in self._content.items():
            length_B[slot] = len(content.token_S)
        return length_B

    def start(self, slot: int, sequence: SequenceState, *, first: int = 0) -> None:
        """Record that a sequence takes the slot; ended responses that are prefixes of its prompt are forgotten.

        Args:
          first: First prompt position that rings hold; 0 if the prompt was run whole.
        """
        self._forget(slot)
        if sequence.request.keep and self._reusable:
            prompt_S = np.asarray(sequence.request.prompt, np.int64)
            for other in [other for other, content in self._content.items() if content.begins(prompt_S)]:
                self._forget(other)
            request_id = sequence.request.request_id
            self._content[slot] = _Content(request_id, prompt_S, self._next_use(), parked=False, first=first)

    def end(self, slot: int, sequence: SequenceState) -> None:
        """Record that the sequence of the slot ended; all its tokens but the last were run through the model."""
        if slot in self._content:
            tokens = (*sequence.request.prompt, *sequence.tokens[:-1])
            digest = _digests(tokens)[-1]
            self._content[slot] = self._content[slot]._replace(
                token_S=np.asarray(tokens, np.int64), used=self._next_use(), parked=True, digest=digest
            )
            self._whole[digest] = slot

    def release(self, request_id: int) -> None:
        """Forget the cached tokens of a request."""
        for slot in [slot for slot, content in self._content.items() if content.request_id == request_id]:
            self._forget(slot)

    def reuse(self, known: PrefixMatch) -> int:
        """Record that a prompt reuses its known prefix, as a use of the slot.

        If the prefix is everything that the slot holds, the prompt's own slot will hold it too. The old slot is then
        the first to be taken.

        Returns:
          First position of the known prefix that rings hold.
        """
        if not known.tokens:
            return 0
        content = self._content[known.slot]
        left = len(content.token_S) - known.tokens
        spent = content.parked and left < (1 if self.ring is None else RING_STEP)
        self._content[known.slot] = content._replace(used=0 if spent else self._next_use())
        return 0 if self.ring is None else self._first(content, self.ring)

    def longest(self, prompt: Sequence[int]) -> PrefixMatch:
        """Return the longest known prefix of a prompt, without the last token, which is run to predict the next one."""
        prompt_S = np.asarray(prompt[:-1], np.int64)
        # A next turn finds its conversation by hash, without a search through all slots.
        for digest in reversed(_digests(prompt[:-1])):
            content = self._content.get(slot := self._whole.get(digest, -1))
            if content is not None and content.begins(prompt_S):
                return PrefixMatch(self._there(content, len(content.token_S)), slot)
        best = PrefixMatch(0, 0)
        for slot, content in self._content.items():
            token_S, shorter = content.token_S, min(len(content.token_S), len(prompt_S))
            if shorter > best.tokens:
                differs = np.flatnonzero(token_S[:shorter] != prompt_S[:shorter])
                alike = int(differs[0]) if len(differs) else shorter
                best = max(best, PrefixMatch(self._there(content, alike), slot))
        return best

    def _there(self, content: _Content, tokens: int) -> int:
        """Return how many of the tokens that a prompt has in common with a slot it can reuse."""
        if self.ring is None:
            return tokens
        tokens -= tokens % RING_STEP  # prompts with equal reused lengths run together
        there = max(tokens - self.ring.window + 1, 0) >= self._first(content, self.ring)
        return tokens if content.parked and there else 0

    @staticmethod
    def _first(content: _Content, ring: Ring) -> int:
        """Return the first position of an ended response that a ring still holds; all later positions are held."""
        return max(content.first, len(content.token_S) + ring.ahead - ring.entries + 1)

    def _forget(self, slot: int) -> None:
        content = self._content.pop(slot, None)
        if content is not None and self._whole.get(content.digest) == slot:
            del self._whole[content.digest]

    def _next_use(self) -> int:
        self._uses += 1
        return self._uses


def prefix_cache_of(shape: Shape, *, slots: int) -> PrefixCache:
    """Return the prefix cache of an engine's slots."""
    config, entries = shape.config, shape.execution.ring_entries
    ring = None
    if isinstance(config, ModelConfig) and config.sliding_window is not None and entries is not None:
        ring = Ring(entries, config.sliding_window, ring_behind(shape.tokens_per_dispatch)[0])
    return PrefixCache(slots=slots, reusable=reusable(config), ring=ring)


def _digests(tokens: Sequence[int]) -> list[int]:
    """Return a hash of each prefix of a sequence, the whole sequence included."""
    return list(accumulate(tokens, lambda before, token: hash((before, token)), initial=0))[1:]
