"""A response from its request to its completion."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxrlhf.batch import Array
from jaxrlhf.config import Sampling


@dataclass(frozen=True)
class Request:
    """One response to generate.

    Attributes:
      request_id: Part of the sampling key, in [0, 2**32); unique among those under way with the same seed.
      prompt_tokens: Token ids, at least one. A prompt that several waiting requests have is prefilled once.
      max_tokens: Most tokens of the response; None is the engine's limit, which is the highest.
      stop_tokens: Ids that end the response and are kept in it; None is the engine's.
      keep: Keep keys and values of prompt and response for requests that begin alike, such as the next turn; until
        they are released, their room is needed, or other weights are loaded. Where experts are recorded, and with a
        model of one's own, requests that begin alike are computed whole all the same.
    """

    request_id: int
    prompt_tokens: tuple[int, ...]
    max_tokens: int | None = None
    stop_tokens: tuple[int, ...] | None = None
    keep: bool = False


@dataclass(frozen=True)
class Completion:
    """One response.

    Attributes:
      tokens: What the policy drew, the stop token included.
      logps: Log-probability of each token at the sampling temperature.
      truncated: Ended by the length limit, not by a stop token.
      version: Version of the weights that drew it.
      choice_TLk: Experts that the prompt's and the response's tokens went through, all but the last; None if not asked.
    """

    request_id: int
    tokens: tuple[int, ...]
    logps: tuple[float, ...]
    truncated: bool
    version: int
    choice_TLk: Any = field(default=None, compare=False, repr=False)


@dataclass(eq=False)
class SequenceState:
    """State of a request under way, on the host.

    Attributes:
      limit: Most tokens of the response.
      tokens, logps: What was drawn and read so far.
      slot: Where its tokens are drawn; None while it waits.
      prompt_choice: Experts of the prefilled prompts, `[P, S, L, k]`, and the row of its own; None if not recorded.
      choices: Experts of the tokens that each window ran, `[W, L, k]`.
    """

    request: Request
    sampling: Sampling
    seed: int
    limit: int
    stop_tokens: tuple[int, ...]
    tokens: list[int] = field(default_factory=list)
    logps: list[float] = field(default_factory=list)
    slot: int | None = None
    prompt_choice: tuple[Array, int] | None = None
    choices: list[np.ndarray] = field(default_factory=list)

    @property
    def key(self) -> tuple[int, int]:
        """Sampling key: what its draws depend on, beside its prompt."""
        return self.seed, self.request.request_id

    def completion(self, version: int) -> Completion:
        """The response, once its last token was read; that one was drawn and never run."""
        choice_TLk = None
        if self.prompt_choice is not None:
            choice_PSLk, row = self.prompt_choice
            prompt_SLk = np.asarray(choice_PSLk)[row, : len(self.request.prompt_tokens)]
            choice_TLk = np.concatenate([prompt_SLk, *self.choices])
        truncated = self.tokens[-1] not in self.stop_tokens
        return Completion(
            self.request.request_id, tuple(self.tokens), tuple(self.logps), truncated, version, choice_TLk
        )
