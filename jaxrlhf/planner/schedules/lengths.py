"""Response lengths: measured in a run, or sampled from a lognormal with a given mean and tail."""

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
        """Mean number of tokens."""

    def sample(self, rng: np.random.Generator, groups: int, copies: int) -> np.ndarray:
        """Sample the number of tokens of each response of each group: int64 `[P, G]`, 1 or more."""


@dataclass(frozen=True)
class LognormalLengths:
    """Lognormal lengths, sampled independently and truncated at the longest.

    Attributes:
      mean_tokens: Mean before truncation.
      tail_tokens: 99th percentile before truncation.
      longest: Number of tokens at which a response is truncated.
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
            f"the tail, the 99th percentile of a lognormal with a mean of {mean:g} tokens, must be above the mean and "
            f"at most {most:.0f}, got {tail:g}",
        )

    @property
    def _mu_sigma(self) -> tuple[float, float]:
        """Solution of mean = exp(mu + sigma^2 / 2) and tail = exp(mu + z sigma) with the smaller sigma."""
        sigma = _Z99 - math.sqrt(_Z99**2 - 2 * math.log(self.tail_tokens / self.mean_tokens))
        return math.log(self.mean_tokens) - sigma**2 / 2, sigma

    @property
    def mean(self) -> float:
        """Mean number of tokens, after truncation."""
        mu, sigma = self._mu_sigma
        normal = NormalDist(mu, sigma)
        cut = (min(self.longest, math.exp(normal.inv_cdf((n + 0.5) / _QUANTILES))) for n in range(_QUANTILES))
        return sum(cut) / _QUANTILES

    def sample(self, rng: np.random.Generator, groups: int, copies: int) -> np.ndarray:
        """Sample the number of tokens of each response of each group: int64 `[P, G]`."""
        length_PG = np.ceil(rng.lognormal(*self._mu_sigma, (groups, copies)))
        return np.clip(length_PG, 1, self.longest).astype(np.int64)


@dataclass(frozen=True)
class MeasuredLengths:
    """Measured lengths of a run's responses. A sampled group has responses of one prompt, which have similar lengths.

    Attributes:
      groups: Number of tokens of the responses of each prompt.
    """

    groups: Sequence[np.ndarray]

    @property
    def mean(self) -> float:
        """Mean number of tokens."""
        return float(np.mean(np.concatenate(self.groups)))

    def sample(self, rng: np.random.Generator, groups: int, copies: int) -> np.ndarray:
        """Sample lengths, int64 `[P, G]`; each response of a prompt at most once if the prompt has enough responses."""
        chosen = (self.groups[index] for index in rng.integers(len(self.groups), size=groups))
        return np.stack([rng.choice(one, copies, replace=len(one) < copies) for one in chosen]).astype(np.int64)


def constant_lengths(tokens: int) -> MeasuredLengths:
    """Return the distribution in which every response has `tokens` tokens."""
    return MeasuredLengths((np.array([tokens]),))


def read_lengths(path: Path | str) -> MeasuredLengths:
    """Read the lengths in a run's `samples.jsonl`, grouped by step and prompt.

    Raises:
      Refusal: The file is missing, is a folder, or has no lengths.
    """
    try:
        records = sorted(
            ((record["step"], record["prompt"], int(record["response_length"])) for record in read_records(path)),
            key=lambda record: record[:2],
        )
    except (OSError, KeyError, TypeError) as error:
        raise Refusal(f"{path} has no response lengths ({error!r}); give the samples.jsonl of a run") from error
    if not records:
        raise Refusal(f"{path} is empty; give the samples.jsonl of a run with at least one step")
    found = groupby(records, key=lambda record: record[:2])
    return MeasuredLengths([np.maximum(1, [length for *_, length in group]) for _, group in found])
