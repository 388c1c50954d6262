"""Drafts of the next tokens of a response, copied from texts that continue as the response may continue.

The texts of a response are its own prompt and tokens, and the other responses to the same prompt: of its group, of
earlier steps and of earlier epochs. The newest tokens of the response are searched in these texts. What follows the
longest match is the draft. No model is asked, so a draft costs microseconds. The texts are in no checkpoint: a resumed
run starts without them and samples the same tokens.

Source: Saxena 2023 (prompt lookup decoding); Oliaro et al. 2024 (SuffixDecoding, arXiv:2411.04975), section 4, which
also votes among equally long matches; He et al. 2023 (REST, arXiv:2311.08252).
"""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

FEWEST_MATCHED, MOST_MATCHED = 2, 12
"""Fewest newest tokens that must occur in a text, and the number of tokens that are compared at most."""

PIECE_TOKENS = 64
"""Number of tokens after which a running response is copied to the texts of its prompt, for the rest of its group."""

OVERLAP = MOST_MATCHED + 8
"""Number of tokens before a piece that are copied with it, so that matches and drafts cross the ends of pieces."""

MOST_VOTES = 16
"""Maximum number of equally long matches that vote for the next token, the newest of them."""

BY_MTP = 1
"""`Draft.matched` of a draft by the layer that predicts the second next token, which no match has."""

END = -1
"""Mark between texts; no token has this id."""


class Draft(NamedTuple):
    """Draft of the next tokens of a response.

    Attributes:
      tokens: Drafted tokens; empty without a match.
      matched: Number of newest tokens that the matching text has in common with the response.
    """

    tokens: tuple[int, ...]
    matched: int


NO_DRAFT = Draft((), 0)


class TokenText:
    """Growing array of tokens.

    Args:
      most: Maximum number of tokens; beyond it the older half is dropped. None is no limit.
    """

    def __init__(self, tokens: Sequence[int] = (), *, most: int | None = None) -> None:
        self._array, self._length, self._most = np.zeros(64, np.int32), 0, most
        self.extend(tokens)

    def __len__(self) -> int:
        return self._length

    @property
    def tokens(self) -> np.ndarray:
        """The tokens, as a view of the array."""
        return self._array[: self._length]

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens."""
        kept = self.tokens
        if self._most is not None and len(kept) + len(tokens) > self._most:
            tokens = tokens[-(self._most // 2) :]
            kept = kept[len(kept) - max(0, self._most // 2 - len(tokens)) :]
        length = len(kept) + len(tokens)
        if length > len(self._array) or len(kept) < self._length:
            array = np.zeros(max(2 * length, 64), np.int32)
            array[: len(kept)] = kept
            self._array = array
        self._array[len(kept) : length] = tokens
        self._length = length


class _Running:
    """Running response: its prompt and tokens, and how many tokens the texts of the prompt have already."""

    def __init__(self, prompt: Sequence[int], key: int) -> None:
        self.text, self.key, self.shared = TokenText(prompt), key, len(prompt)


class DraftIndex:
    """Texts of running and of earlier responses, and the drafts that these texts give.

    Earlier responses are dropped first in, first out: the older half of the responses to one prompt, and whole prompts.

    Args:
      most_tokens: Maximum number of tokens of earlier responses, over all prompts.
      most_of_prompt: Maximum number of tokens of earlier responses to one prompt.
    """

    def __init__(self, *, most_tokens: int = 1 << 22, most_of_prompt: int = 1 << 15) -> None:
        self._most, self._most_of_prompt = most_tokens, most_of_prompt
        self._earlier: dict[int, TokenText] = {}  # by hash of the prompt, the oldest prompt first
        self._running: dict[int, _Running] = {}
        self.tokens = 0

    def start(self, number: int, prompt: Sequence[int]) -> None:
        """Start a response, with a number that no other running response has."""
        self._running[number] = _Running(prompt, hash(tuple(prompt)))

    def extend(self, number: int, tokens: Sequence[int]) -> None:
        """Append sampled tokens to a running response."""
        response = self._running[number]
        response.text.extend(tokens)
        if len(response.text) - response.shared >= PIECE_TOKENS:
            self._share(response)

    def end(self, number: int) -> None:
        """End a response; its tokens stay among the texts of its prompt. Do nothing if it was not started."""
        response = self._running.pop(number, None)
        if response is not None:
            self._share(response)

    def clear_running(self) -> None:
        """Drop the running responses."""
        self._running.clear()

    def draft(self, number: int, most: int) -> Draft:
        """Return a draft of at most `most` tokens that may follow the newest token of a running response."""
        response = self._running[number]
        own, earlier = response.text.tokens, self._earlier.get(response.key)
        texts = own if earlier is None else np.concatenate([earlier.tokens, own])
        return _continued(texts, own[-MOST_MATCHED:], most)

    def _share(self, response: _Running) -> None:
        """Copy the tokens of a response that are new to the texts of its prompt, after the tokens before them."""
        tokens = response.text.tokens
        if response.shared == len(tokens):
            return
        piece = tokens[max(0, response.shared - OVERLAP) :]
        earlier = self._earlier.setdefault(response.key, TokenText(most=self._most_of_prompt))
        before, response.shared = len(earlier), len(tokens)
        earlier.extend([*piece.tolist(), END])
        self.tokens += len(earlier) - before
        while self.tokens > self._most:
            self.tokens -= len(self._earlier.pop(next(iter(self._earlier))))


def _continued(text: np.ndarray, newest: np.ndarray, most: int) -> Draft:
    """Return what follows the longest match of the newest tokens in a text that ends with these tokens.

    Equally long matches vote for each token; matches that continue otherwise have no vote in the tokens after it.
    """
    if len(newest) < FEWEST_MATCHED or most < 1:
        return NO_DRAFT
    place = np.flatnonzero(text[:-1] == newest[-1]) + 1  # of the token after a match
    matched = 1
    for matched in range(2, len(newest) + 1):
        longer = place[place >= matched]
        longer = longer[text[longer - matched] == newest[-matched]]
        if not len(longer):
            matched -= 1
            break
        place = longer
    if matched < FEWEST_MATCHED:
        return NO_DRAFT
    place = place[-MOST_VOTES:][::-1]
    tokens: list[int] = []
    while len(tokens) < most:
        place = place[place < len(text)]
        votes = Counter(text[place].tolist())
        votes.pop(END, None)
        if not votes:
            break
        token = votes.most_common(1)[0][0]
        tokens.append(token)
        place = place[text[place] == token] + 1
    return Draft(tuple(tokens), matched if tokens else 0)
