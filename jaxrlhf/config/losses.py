"""What losses share: aggregation, the KL to the reference, the loss of a critic."""

from dataclasses import dataclass
from typing import Literal

from jaxrlhf.config.refusal import positive

Aggregation = Literal[
    "token-mean", "token-sum", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm", "prompt-mean"
]
KLEstimator = Literal["k1", "abs", "k2", "k3", "k1+", "k3+"]


@dataclass(frozen=True)
class AdaptiveKL:
    """Steer the coefficient towards a KL (Ziegler et al. 2019, arXiv:1909.08593, section 2.2).

    Attributes:
      target: Mean of k1 per chosen token, in nats: not the sum over a response, which the paper aims at.
      horizon: Responses in which the coefficient may grow or shrink by a fifth.
    """

    target: float = 0.1
    horizon: int = 10_000

    def __post_init__(self) -> None:
        positive(self, "target", "horizon")


@dataclass(frozen=True)
class KLInReward:
    """Subtract `coefficient * kl` from each token's reward; the KL is to the reference policy.

    Attributes:
      estimator: With d = logp - ref_logp: `k1` is d, `abs` is |d|, `k2` is d^2 / 2 and
        `k3` is exp(-d) - 1 + d.
    """

    coefficient: float = 0.001
    estimator: Literal["k1", "abs", "k2", "k3"] = "k1"
    adaptive: AdaptiveKL | None = None

    def __post_init__(self) -> None:
        positive(self, "coefficient")


@dataclass(frozen=True)
class KLInLoss:
    """Add `coefficient * kl` to each token's loss; the KL is to the reference policy.

    Attributes:
      estimator: As for `KLInReward`. `k1+` and `k3+` have the value of k1 and k3, and the
        gradient of k2, which is the reverse KL's.
    """

    coefficient: float = 0.001
    estimator: KLEstimator = "k3"
    adaptive: AdaptiveKL | None = None

    def __post_init__(self) -> None:
        positive(self, "coefficient")


@dataclass(frozen=True)
class ValueLoss:
    """Clipped value regression; the value moves at most `clip` from the old one."""

    clip: float = 0.5

    def __post_init__(self) -> None:
        positive(self, "clip")
