"""A response from its request to its completion."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from jaxrlhf.batch import Array, Image, SeenPrompt
from jaxrlhf.config import Sampling

Decode = Callable[[Sequence[int]], str]
"""Function from token ids to text, for stop texts."""

_MARGIN_TOKENS = 8
"""Tokens decoded before those that a stop text may reach back to: a byte of it is a token at most, some are empty."""


@dataclass(frozen=True)
class Request:
    """One response to generate.

    Attributes:
      request_id: Part of the sampling key, in [0, 2**32); unique among those under way with the same seed.
      prompt_tokens: Token ids, at least one. A prompt that several waiting requests have is prefilled once.
      max_tokens: Most tokens of the response; None is the engine's limit, which is the highest.
      stop_tokens: Ids that end the response and are kept in it; None is the engine's.
      stop_texts: Texts that end the response with the token that completes them, which is kept; None is the engine's.
      keep: Keep keys and values of prompt and response for requests that begin alike, such as the next turn; until
        they are released, their room is needed, or other weights are loaded. Where experts are recorded, and with a
        model of one's own, requests that begin alike are computed whole all the same.
      images: Images of the prompt; those of two prompts with equal tokens may differ.
      drawn: Last tokens of the prompt that are the response's own, drawn before: it goes on as if it had drawn them
        here, within the limits of the whole. Its completion has those that follow.
      has_replies: The prompt has earlier replies, in which placeholders that the policy drew stand for no image.
    """

    request_id: int
    prompt_tokens: tuple[int, ...]
    max_tokens: int | None = None
    stop_tokens: tuple[int, ...] | None = None
    stop_texts: tuple[str, ...] | None = None
    keep: bool = False
    images: tuple[Image, ...] = ()
    drawn: int = 0
    has_replies: bool = False

    @cached_property
    def prompt(self) -> tuple[int, ...]:
        """The prompt by which requests share what was computed."""
        return SeenPrompt.of(self.prompt_tokens, self.images)


@dataclass(frozen=True)
class Completion:
    """One response.

    Attributes:
      tokens: What the policy drew, the stop token included.
      logps: Log-probability of each token at the sampling temperature.
      truncated: Ended by the length limit, not by a stop token or text.
      version: Version of the weights that drew it.
      choice_TLk: Experts that the prompt's and the response's tokens went through, all but the last; None if not asked.
      stop_text: Text that ended it; None if none did.
      kept_TK: int32, ids that each token of the response was drawn among, -1 past them; None if not recorded.
    """

    request_id: int
    tokens: tuple[int, ...]
    logps: tuple[float, ...]
    truncated: bool
    version: int
    choice_TLk: Any = field(default=None, compare=False, repr=False)
    stop_text: str | None = None
    kept_TK: Any = field(default=None, compare=False, repr=False)


class Drawn(NamedTuple):
    """Tokens that one slot drew since it was last read.

    Attributes:
      active: Whether its response goes on; if not, the slot is free.
      choice_WLk: int16, experts of the tokens that were run; None if not recorded.
      kept_WK: int32, tokens that each was drawn among; None if not recorded.
    """

    slot: int
    tokens: list[int]
    logps: list[float]
    active: bool
    choice_WLk: np.ndarray | None
    kept_WK: np.ndarray | None


@dataclass(eq=False)
class SequenceState:
    """State of a request under way, on the host.

    Attributes:
      limit: Most tokens of the response, those drawn before included.
      on_tokens: Told of tokens and their log-probabilities as they are read.
      on_completion: Told of the response once it has ended.
      tokens, logps: What was drawn and read so far.
      slot: Where its tokens are drawn; None while it waits.
      prompt_choice: Experts of the prefilled prompts, `[P, S, L, k]`, and the row of its own; None if not recorded.
      choices: Experts of the tokens that each window ran, `[W, L, k]`.
      kept: Tokens that those of each window were drawn among, `[W, K]`.
      placed_at: Seconds on the monotonic clock when it took its slot.
      stop_text: Text that ended it; None as long as none did.
    """

    request: Request
    sampling: Sampling
    seed: int
    limit: int
    stop_tokens: tuple[int, ...]
    stop_texts: tuple[str, ...] = ()
    on_tokens: Callable[[Sequence[int], Sequence[float]], None] | None = None
    on_completion: Callable[[Completion], None] | None = None
    tokens: list[int] = field(default_factory=list)
    logps: list[float] = field(default_factory=list)
    slot: int | None = None
    prompt_choice: tuple[Array, int] | None = None
    choices: list[np.ndarray] = field(default_factory=list)
    kept: list[np.ndarray] = field(default_factory=list)
    placed_at: float = 0.0
    stop_text: str | None = None

    def draw(self, drawn: Drawn, decode: Decode | None) -> None:
        """Tokens were drawn; those after a stop text are dropped.

        Args:
          decode: Function that a request with stop texts needs.
        """
        before = len(self.tokens)
        self.tokens += drawn.tokens
        self.logps += drawn.logps
        if drawn.choice_WLk is not None:
            self.choices.append(drawn.choice_WLk)
        if drawn.kept_WK is not None:
            self.kept.append(drawn.kept_WK)
        if self.stop_texts:
            assert decode is not None, "an engine that cannot decode refuses stop texts"
            self._cut(before, decode)
        if self.on_tokens is not None:
            self.on_tokens(self.tokens[before:], self.logps[before:])

    def _cut(self, before: int, decode: Decode) -> None:
        """End with the token that completes a stop text, if one after the first `before` does."""
        reach = max(len(text.encode()) for text in self.stop_texts) + _MARGIN_TOKENS
        prompt, drawn = self.request.prompt_tokens, self.request.drawn
        response, before = [*prompt[len(prompt) - drawn :], *self.tokens], before + drawn
        first = max(self.sampling.min_tokens, before - reach, 0)

        def found(end: int) -> str | None:
            text = decode(response[first:end])
            return next((stop for stop in self.stop_texts if stop in text), None)

        if found(len(response)) is not None:
            ends = range(max(before, first) + 1, len(response) + 1)
            end, self.stop_text = next((end, stop) for end in ends if (stop := found(end)) is not None)
            del self.tokens[end - drawn :], self.logps[end - drawn :]

    def complete(self, version: int) -> Completion:
        """The response, once its last token was read, from which nothing was computed; its listener is told."""
        tokens, choice_TLk = tuple(self.tokens), None
        if self.prompt_choice is not None:
            choice_PSLk, row = self.prompt_choice
            length = len(self.request.prompt_tokens)
            prompt_SLk = np.asarray(choice_PSLk)[row, :length]
            choice_TLk = np.concatenate([prompt_SLk, *self.choices])[: length + len(tokens) - 1]
        truncated = self.stop_text is None and tokens[-1] not in self.stop_tokens
        kept_TK = np.concatenate(self.kept)[: len(tokens)] if self.kept else None
        numbers = tokens, tuple(self.logps), truncated, version
        completion = Completion(self.request.request_id, *numbers, choice_TLk, self.stop_text, kept_TK)
        if self.on_completion is not None:
            self.on_completion(completion)
        return completion
