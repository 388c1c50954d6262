"""What a policy and a critic are trained on: losses, the KL to the reference, corrections."""

from dataclasses import dataclass
from typing import Literal

from jaxrlhf.config.check import positive, require, within

Aggregation = Literal[
    "token-mean", "token-sum", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm", "prompt-mean"
]
KLEstimator = Literal["k1", "abs", "k2", "k3", "k1+", "k3+"]


@dataclass(frozen=True)
class AdaptiveKL:
    """Steer the coefficient towards a KL (Ziegler et al. 2019, arXiv:1909.08593, section 2.2)."""

    target: float = 6.0
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
class PolicyLoss:
    """Clipped policy-gradient loss.

    Attributes:
      clip_low: Ratio may fall to 1 - clip_low.
      clip_high: Ratio may rise to 1 + clip_high.
      dual_clip: Bound on the loss of tokens with negative advantage, as a multiple of it; None is off.
      aggregation: How token losses become one number; every count is over the whole update.
        `token-mean`: their sum over the number of trained tokens (DAPO). `token-sum`: their sum.
        `seq-mean-token-mean`: the mean within each response, then over responses (GRPO).
        `seq-mean-token-sum`: the sum within each response, then the mean over responses.
        `seq-mean-token-sum-norm`: that over `max_response_tokens` (Dr. GRPO).
        `prompt-mean`: the token-mean over each prompt's responses, then the mean over prompts.
      entropy_coefficient: Weight of the entropy bonus; 0 computes no entropy.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = 3.0
    aggregation: Aggregation = "token-mean"
    entropy_coefficient: float = 0.0

    def __post_init__(self) -> None:
        positive(self, "clip_low", "clip_high")
        within(self, "clip_low", 0.0, 1.0)
        require(
            self.dual_clip is None or self.dual_clip > 1,
            f"PolicyLoss.dual_clip must be above 1 or None, got {self.dual_clip}",
        )


@dataclass(frozen=True)
class ValueLoss:
    """Clipped value regression; the value moves at most `clip` from the old one."""

    clip: float = 0.5

    def __post_init__(self) -> None:
        positive(self, "clip")


@dataclass(frozen=True)
class TruncatedImportance:
    """Weight tokens by min(pi_old / pi_sampler, cap): corrects sampler-trainer mismatch."""

    cap: float = 2.0

    def __post_init__(self) -> None:
        positive(self, "cap")
