"""Contents of slots: which tokens have their keys and values in the cache, for prompts that begin alike."""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from jaxrlhf.engine.buckets import RING_STEP, Shape, ring_behind
from jaxrlhf.engine.sequence import SequenceState
from jaxrlhf.models.causal_lm import AnyModel
from jaxrlhf.models.config import ModelConfig


class Known(NamedTuple):
    """The longest beginning of a prompt whose keys and values are in a slot; 0 tokens if there is none."""

    tokens: int
    slot: int


class Ring(NamedTuple):
    """Rings of a cache.

    Attributes:
      entries: Positions that a slot keeps.
      window: Positions that a token sees, itself included.
      ahead: Tokens that may have been drawn after the last one of a response that has ended.
    """

    entries: int
    window: int
    ahead: int


class _Content(NamedTuple):
    """Tokens of a slot.

    Attributes:
      first: Position from which on a ring may have them; in the place of earlier ones it has others.
    """

    request_id: int
    token_S: np.ndarray
    used: int
    parked: bool
    digest: int = 0
    first: int = 0

    def begins(self, prompt_S: np.ndarray) -> bool:
        """A response that has ended, all of which a prompt goes on from."""
        return self.parked and bool(np.array_equal(self.token_S, prompt_S[: len(self.token_S)]))


def reusable(config: AnyModel) -> bool:
    """False if every prompt is run whole.

    A state is one of the slot's last token, and none before it; and images that are seen both ways are not cut.
    """
    return config.linear is None and not (config.vision is not None and config.vision.both_ways)


class Contents:
    """Tokens in the cache, slot by slot, of requests with `keep`.

    They outlive the response, until another takes the slot: slots that hold nothing are taken first, then those that
    were used least recently, by a request of their own or one that began alike.

    Rings keep the newest positions of a slot. A prompt goes on from a response that has ended, if it leaves out little
    of its end; from farther back the window of its first token is not there any more, and it is run whole.

    Args:
      reusable: Prompts can go on from what a slot holds.
      ring: Rings of the layers with a window; None if all layers keep all.
    """

    def __init__(self, *, slots: int, reusable: bool = True, ring: Ring | None = None) -> None:
        self._slots, self._reusable, self.ring = slots, reusable, ring
        self._content: dict[int, _Content] = {}
        self._whole: dict[int, int] = {}  # slots of responses that have ended, by the digest of all their tokens
        self._uses = 0

    def used(self, slot: int) -> int:
        """Number of the last use of a slot, from 1; 0 if it holds nothing that another will not."""
        return self._content[slot].used if slot in self._content else 0

    @property
    def length_B(self) -> np.ndarray:
        """Tokens kept in each slot, in use or not."""
        length_B = np.zeros(self._slots, np.int64)
        for slot, content in self._content.items():
            length_B[slot] = len(content.token_S)
        return length_B

    def start(self, slot: int, sequence: SequenceState, *, first: int = 0) -> None:
        """A sequence takes the slot; its prompt is there, and need be nowhere else.

        Args:
          first: Position from which on rings have it; 0 if it was run whole.
        """
        self._forget(slot)
        if sequence.request.keep and self._reusable:
            prompt_S = np.asarray(sequence.request.prompt, np.int64)
            for other in [other for other, content in self._content.items() if content.begins(prompt_S)]:
                self._forget(other)
            request_id = sequence.request.request_id
            self._content[slot] = _Content(request_id, prompt_S, self._next_use(), parked=False, first=first)

    def end(self, slot: int, sequence: SequenceState) -> None:
        """The sequence of the slot ended; all its tokens but the last were run."""
        if slot in self._content:
            tokens = (*sequence.request.prompt, *sequence.tokens[:-1])
            digest = _digests(tokens)[-1]
            self._content[slot] = self._content[slot]._replace(
                token_S=np.asarray(tokens, np.int64), used=self._next_use(), parked=True, digest=digest
            )
            self._whole[digest] = slot

    def release(self, request_id: int) -> None:
        """Forget what is kept of a request."""
        for slot in [slot for slot, content in self._content.items() if content.request_id == request_id]:
            self._forget(slot)

    def go_on(self, known: Known) -> int:
        """A prompt goes on from what is known of it, which counts as a use of the slot.

        Where that is all there is, the prompt's own slot will have it too, so that this one is the first to be taken.

        Returns:
          The first position that rings have of what is known.
        """
        if not known.tokens:
            return 0
        content = self._content[known.slot]
        left = len(content.token_S) - known.tokens
        spent = content.parked and left < (1 if self.ring is None else RING_STEP)
        self._content[known.slot] = content._replace(used=0 if spent else self._next_use())
        return 0 if self.ring is None else self._first(content, self.ring)

    def longest(self, prompt: Sequence[int]) -> Known:
        """The longest known beginning of a prompt, without its last token, which is run to predict the next."""
        prompt_S = np.asarray(prompt[:-1], np.int64)
        # The conversation so far, of a next turn, is found without a look at all others.
        for digest in reversed(_digests(prompt[:-1])):
            content = self._content.get(slot := self._whole.get(digest, -1))
            if content is not None and content.begins(prompt_S):
                return Known(self._there(content, len(content.token_S)), slot)
        best = Known(0, 0)
        for slot, content in self._content.items():
            token_S, shorter = content.token_S, min(len(content.token_S), len(prompt_S))
            if shorter > best.tokens:
                differs = np.flatnonzero(token_S[:shorter] != prompt_S[:shorter])
                alike = int(differs[0]) if len(differs) else shorter
                best = max(best, Known(self._there(content, alike), slot))
        return best

    def _there(self, content: _Content, tokens: int) -> int:
        """Tokens that a prompt can go on from, of those that it has in common with a slot."""
        if self.ring is None:
            return tokens
        tokens -= tokens % RING_STEP  # prompts that have as many run together
        there = max(tokens - self.ring.window + 1, 0) >= self._first(content, self.ring)
        return tokens if content.parked and there else 0

    @staticmethod
    def _first(content: _Content, ring: Ring) -> int:
        """The first position that a ring has of a response that has ended; those up to its last token follow."""
        return max(content.first, len(content.token_S) + ring.ahead - ring.entries + 1)

    def _forget(self, slot: int) -> None:
        content = self._content.pop(slot, None)
        if content is not None and self._whole.get(content.digest) == slot:
            del self._whole[content.digest]

    def _next_use(self) -> int:
        self._uses += 1
        return self._uses


def contents_of(shape: Shape, *, slots: int) -> Contents:
    """Contents of an engine's slots."""
    config, entries = shape.config, shape.execution.ring_entries
    ring = None
    if isinstance(config, ModelConfig) and config.sliding_window is not None and entries is not None:
        ring = Ring(entries, config.sliding_window, ring_behind(shape.tokens_per_dispatch)[0])
    return Contents(slots=slots, reusable=reusable(config), ring=ring)


def _digests(tokens: Sequence[int]) -> list[int]:
    """A number for each beginning of a sequence, the whole included."""
    return list(accumulate(tokens, lambda before, token: hash((before, token)), initial=0))[1:]
