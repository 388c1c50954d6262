"""Requests, completions, and the host state of a response in between."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from jaxrlhf.batch import KEPT, ROUTING, Array, Image, SeenPrompt
from jaxrlhf.config import Sampling

Decode = Callable[[Sequence[int]], str]
"""Function from token ids to text, for stop texts."""

_MARGIN_TOKENS = 8
"""Extra tokens decoded before the earliest token of a possible stop text. A stop text has at most one token per byte,
and some tokens are empty."""


@dataclass(frozen=True)
class Request:
    """Request for one response.

    Attributes:
      request_id: Part of the sampling key, in [0, 2**32); unique among the requests in progress with the same seed.
      prompt_tokens: Token ids, at least one. A prompt that several waiting requests share is prefilled once.
      max_tokens: Maximum number of response tokens; None is the engine's limit, which is the highest allowed.
      stop_tokens: Ids that end the response and are kept in it; None takes the engine's.
      stop_texts: Texts that end the response; the token that completes a text is kept. None takes the engine's.
      keep: True keeps the KV cache of prompt and response for later requests with the same prefix, such as the next
        turn. The cache stays until it is released, its room is needed, or other weights are loaded. If experts are
        recorded, and for a user-defined model, requests with the same prefix are computed whole nevertheless.
      images: Images of the prompt; two prompts with equal tokens may have different images.
      sampled: Number of tokens at the end of the prompt that belong to the response and were sampled earlier. Sampling
        continues as if the engine had sampled them itself, and limits count them. The completion has only the tokens
        that follow them.
      has_replies: True if the prompt contains earlier replies; image placeholders that the policy sampled in replies
        stand for no image.
      constraint: Constraint of the response, advanced as tokens are sampled, so of no other request; None is free.
    """

    request_id: int
    prompt_tokens: tuple[int, ...]
    max_tokens: int | None = None
    stop_tokens: tuple[int, ...] | None = None
    stop_texts: tuple[str, ...] | None = None
    keep: bool = False
    images: tuple[Image, ...] = ()
    sampled: int = 0
    has_replies: bool = False
    constraint: Any = field(default=None, compare=False)

    @cached_property
    def prompt(self) -> tuple[int, ...]:
        """The prompt as the key of caches: equal only if tokens and images are equal."""
        return SeenPrompt.of(self.prompt_tokens, self.images)


@dataclass(frozen=True)
class Completion:
    """Completed response.

    Attributes:
      tokens: Tokens that the policy sampled, the stop token included.
      logps: Log-probability of each token at the sampling temperature.
      truncated: True if the length limit ended the response, not a stop token or text.
      version: Version of the weights that sampled the response.
      stop_text: Stop text that ended the response; None if none did.
      recorded: Recorded columns by name, as in `Sequences.recorded`: index of the first token in prompt and response,
        and the values from there on.
    """

    request_id: int
    tokens: tuple[int, ...]
    logps: tuple[float, ...]
    truncated: bool
    version: int
    stop_text: str | None = None
    recorded: Mapping[str, tuple[int, np.ndarray]] = field(default_factory=dict, compare=False, repr=False)


class WindowTokens(NamedTuple):
    """Tokens of one slot in the decode window that was read.

    Attributes:
      active: True if the response continues; else the slot is free.
      choice_WLk: int16, experts of the tokens that were run through the model; None if not recorded.
      kept_WK: int32, sampling mask of each token; None if not recorded.
      drafted: Tokens that the model drafted after the last of the tokens.
    """

    slot: int
    tokens: list[int]
    logps: list[float]
    active: bool
    choice_WLk: np.ndarray | None
    kept_WK: np.ndarray | None
    drafted: tuple[int, ...] = ()


@dataclass(eq=False)
class SequenceState:
    """Host state of a request in progress.

    Attributes:
      limit: Maximum number of response tokens, including `request.sampled`.
      on_tokens: Listener for tokens and their log-probabilities, called as they are read.
      on_completion: Listener for the completed response.
      tokens, logps: Tokens read so far, and their log-probabilities.
      slot: Slot that samples the tokens; None while the request waits.
      prompt_choice: Experts of the prefilled prompts, `[P, S, L, k]`, and this request's row; None if not recorded.
      choices: Experts of the tokens that each decode window ran, `[W, L, k]`.
      kept: Sampling masks of the tokens of each decode window, `[W, K]`.
      placed_at: Time on the monotonic clock when the request took its slot, in seconds.
      stop_text: Stop text that ended the response; None until then.
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

    def extend(self, read: WindowTokens, decode: Decode | None) -> None:
        """Append sampled tokens; tokens after a stop text are dropped.

        Args:
          decode: Detokenizer; needed if the request has stop texts.
        """
        before = len(self.tokens)
        self.tokens += read.tokens
        self.logps += read.logps
        if read.choice_WLk is not None:
            self.choices.append(read.choice_WLk)
        if read.kept_WK is not None:
            self.kept.append(read.kept_WK)
        if self.stop_texts:
            assert decode is not None, "an engine that cannot decode refuses stop texts"
            self._cut(before, decode)
        if self.on_tokens is not None:
            self.on_tokens(self.tokens[before:], self.logps[before:])

    def _cut(self, before: int, decode: Decode) -> None:
        """Truncate the response after the token that completes a stop text, if it is not among the first `before`."""
        reach = max(len(text.encode()) for text in self.stop_texts) + _MARGIN_TOKENS
        prompt, sampled = self.request.prompt_tokens, self.request.sampled
        response, before = [*prompt[len(prompt) - sampled :], *self.tokens], before + sampled
        first = max(self.sampling.min_tokens, before - reach, 0)

        def found(end: int) -> str | None:
            text = decode(response[first:end])
            return next((stop for stop in self.stop_texts if stop in text), None)

        if found(len(response)) is not None:
            ends = range(max(before, first) + 1, len(response) + 1)
            end, self.stop_text = next((end, stop) for end in ends if (stop := found(end)) is not None)
            del self.tokens[end - sampled :], self.logps[end - sampled :]

    def complete(self, version: int) -> Completion:
        """Build the completion after the last token was read, and call the completion listener.

        The last token was sampled and never run through the model, so it has no experts.
        """
        tokens, length = tuple(self.tokens), len(self.request.prompt_tokens)
        recorded = {}
        if self.prompt_choice is not None:
            choice_PSLk, row = self.prompt_choice
            prompt_SLk = np.asarray(choice_PSLk)[row, :length]
            recorded[ROUTING] = 0, np.concatenate([prompt_SLk, *self.choices])[: length + len(tokens) - 1]
        truncated = self.stop_text is None and tokens[-1] not in self.stop_tokens
        if self.kept:
            recorded[KEPT] = length, np.concatenate(self.kept)[: len(tokens)]
        numbers = tokens, tuple(self.logps), truncated, version
        completion = Completion(self.request.request_id, *numbers, self.stop_text, recorded)
        if self.on_completion is not None:
            self.on_completion(completion)
        return completion
