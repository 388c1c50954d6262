"""Lengths of responses: those that a run wrote, or drawn from a mean and a tail."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from statistics import NormalDist
from typing import Protocol

import numpy as np

from jaxrlhf.config import Refusal
from jaxrlhf.config.refusal import require
from jaxrlhf.tracking.records import read_records

_Z99 = NormalDist().inv_cdf(0.99)
_QUANTILES = 4096


class ResponseLengths(Protocol):
    """Distribution of response lengths."""

    @property
    def mean(self) -> float:
        """Mean tokens."""

    def draw(self, rng: np.random.Generator, groups: int, copies: int) -> np.ndarray:
        """int64 `[P, G]`, tokens of each response of each group, 1 or more."""


@dataclass(frozen=True)
class LognormalLengths:
    """Lognormal lengths, each drawn by itself and cut at the longest.

    Attributes:
      mean_tokens: Mean before the cut.
      tail_tokens: 99th percentile before the cut.
      longest: Tokens at which a response is cut.
    """

    mean_tokens: float
    tail_tokens: float
    longest: int

    def __post_init__(self) -> None:
        mean, tail = self.mean_tokens, self.tail_tokens
        require(
            0 < mean <= self.longest,
            f"the mean length must be above 0 and at most the longest response, {self.longest} tokens, got {mean}",
        )
        most = mean * math.exp(_Z99**2 / 2)
        require(
            mean < tail <= most,
            f"the tail is the 99th percentile of a lognormal with a mean of {mean:g} tokens, so it is above that and "
            f"at most {most:.0f}, got {tail:g}",
        )

    @property
    def _mu_sigma(self) -> tuple[float, float]:
        """Solution of mean = exp(mu + sigma^2 / 2) and tail = exp(mu + z sigma), the one with the smaller sigma."""
        sigma = _Z99 - math.sqrt(_Z99**2 - 2 * math.log(self.tail_tokens / self.mean_tokens))
        return math.log(self.mean_tokens) - sigma**2 / 2, sigma

    @property
    def mean(self) -> float:
        """Mean tokens, with the cut."""
        mu, sigma = self._mu_sigma
        normal = NormalDist(mu, sigma)
        cut = (min(self.longest, math.exp(normal.inv_cdf((n + 0.5) / _QUANTILES))) for n in range(_QUANTILES))
        return sum(cut) / _QUANTILES

    def draw(self, rng: np.random.Generator, groups: int, copies: int) -> np.ndarray:
        """int64 `[P, G]`, tokens of each response of each group."""
        length_PG = np.ceil(rng.lognormal(*self._mu_sigma, (groups, copies)))
        return np.clip(length_PG, 1, self.longest).astype(np.int64)


@dataclass(frozen=True)
class MeasuredLengths:
    """Lengths of a run's responses. A group is drawn with responses of one prompt, which are alike in length.

    Attributes:
      groups: Tokens of the responses of each prompt.
    """

    groups: Sequence[np.ndarray]

    @property
    def mean(self) -> float:
        """Mean tokens."""
        return float(np.mean(np.concatenate(self.groups)))

    def draw(self, rng: np.random.Generator, groups: int, copies: int) -> np.ndarray:
        """int64 `[P, G]`; responses of a prompt are drawn once each where it has enough of them."""
        chosen = (self.groups[index] for index in rng.integers(len(self.groups), size=groups))
        return np.stack([rng.choice(one, copies, replace=len(one) < copies) for one in chosen]).astype(np.int64)


def constant_lengths(tokens: int) -> MeasuredLengths:
    """Responses of one length."""
    return MeasuredLengths((np.array([tokens]),))


def read_lengths(path: Path | str) -> MeasuredLengths:
    """Lengths in a run's `samples.jsonl`, grouped by step and prompt.

    Raises:
      Refusal: No such file, a folder, or no lengths in it.
    """
    try:
        records = sorted(
            ((record["step"], record["prompt"], int(record["response_length"])) for record in read_records(path)),
            key=lambda record: record[:2],
        )
    except (OSError, KeyError, TypeError) as error:
        raise Refusal(f"{path} has no lengths of responses ({error!r}); give the samples.jsonl of a run") from error
    if not records:
        raise Refusal(f"{path} is empty; give the samples.jsonl of a run that made a step")
    found = groupby(records, key=lambda record: record[:2])
    return MeasuredLengths([np.maximum(1, [length for *_, length in group]) for _, group in found])
