"""Two constants from timings: seconds of one step, and bytes per second."""

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from jaxrlhf.config import Refusal

ROUNDS = 60
"""Each narrows the search to about two thirds; this many reach the precision of a float."""

GRID = 200
BEYOND = 16
"""How far outside the sampled sizes a step may be worth bytes: past that the samples could not tell."""


class Sample(NamedTuple):
    """One timing of something that takes steps, one after another, and bytes.

    Attributes:
      num_bytes: In all steps.
    """

    steps: int
    num_bytes: float
    seconds: float


def all_reduce_sample(group: int, num_bytes: float, seconds: float) -> Sample:
    """Of a ring over `group` devices each of which holds `num_bytes`: 2 (g - 1) steps, 2 (g - 1) / g of them sent.

    Source: Thakur et al. 2005 (Optimization of collective communication operations in MPICH), section 4.5.
    """
    return Sample(2 * (group - 1), 2 * (group - 1) / group * num_bytes, seconds)


def all_gather_sample(group: int, num_bytes: float, seconds: float) -> Sample:
    """Of a ring whose result is `num_bytes` on every device: g - 1 steps, (g - 1) / g of them sent.

    Source: Thakur et al. 2005, section 4.1.
    """
    return Sample(group - 1, (group - 1) / group * num_bytes, seconds)


def fit_link(samples: Sequence[Sample]) -> tuple[float, float]:
    """The latency of a step and the rate that explain the samples best.

        t = steps * latency_s + num_bytes / bytes_per_s

    The sum of |log(predicted / measured)| is least, so that a sample of microseconds counts as
    much as one of milliseconds, and one disturbed timing does not carry the rest away. Both
    constants are above 0.

    Returns:
      `(latency_s, bytes_per_s)`.

    Raises:
      Refusal: Fewer than two samples, or one that is not above 0.
    """
    if len(samples) < 2 or any(min(sample) <= 0 for sample in samples):
        raise Refusal(
            f"two constants need two or more samples with steps, bytes and seconds above 0, got {list(samples)}"
        )
    each = [sample.num_bytes / sample.steps for sample in samples]
    low, high = math.log(min(each) / BEYOND), math.log(max(each) * BEYOND)
    # One unknown: the bytes that would take as long as a step's latency. The rate then follows.
    width = (high - low) / GRID
    best = min((low + index * width for index in range(GRID + 1)), key=lambda worth: _misfit(samples, worth))
    worth = _least(samples, max(low, best - width), min(high, best + width))
    seconds_per_byte = math.exp(_scale(samples, worth))
    return math.exp(worth) * seconds_per_byte, 1 / seconds_per_byte


def _scale(samples: Sequence[Sample], worth: float) -> float:
    """log of the seconds per byte that fit best."""
    return statistics.median(_log_ratio(sample, worth) for sample in samples)


def _misfit(samples: Sequence[Sample], worth: float) -> float:
    scale = _scale(samples, worth)
    return sum(abs(_log_ratio(sample, worth) - scale) for sample in samples)


def _log_ratio(sample: Sample, worth: float) -> float:
    return math.log(sample.seconds / (sample.steps * math.exp(worth) + sample.num_bytes))


def _least(samples: Sequence[Sample], low: float, high: float) -> float:
    """Golden-section search. Source: Kiefer 1953 (Sequential minimax search for a maximum)."""
    golden = (math.sqrt(5) - 1) / 2
    for _ in range(ROUNDS):
        near, far = high - golden * (high - low), low + golden * (high - low)
        if _misfit(samples, near) <= _misfit(samples, far):
            high = far
        else:
            low = near
    return (low + high) / 2
