"""Policy losses, the KL to the reference, the critic's loss, and corrections for sampler-trainer mismatch."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from jaxrlhf.config.refusal import finite, not_negative, positive, require, within

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


@dataclass(frozen=True, kw_only=True)
class RatioLoss:
    """What every loss of a policy has. Subclass it for a new one.

    Class attributes:
      function: The loss of one token, a function of `PolicyTokens` and these settings that returns `PolicyTerms`
        (see `jaxrlhf.algos`), or its name as `module:function`.

    Attributes:
      aggregation: How token losses become one number; every count is over the whole update.
        `token-mean`: their sum over the number of trained tokens (DAPO). `token-sum`: their sum.
        `seq-mean-token-mean`: the mean within each response, then over responses (GRPO).
        `seq-mean-token-sum`: the sum within each response, then the mean over responses.
        `seq-mean-token-sum-norm`: that over `max_response_tokens` (Dr. GRPO).
        `prompt-mean`: the token-mean over each prompt's responses, then the mean over prompts.
      entropy_coefficient: Weight of the entropy bonus; 0 computes no entropy.
    """

    function: ClassVar[Callable[..., Any] | str]

    aggregation: Aggregation = "token-mean"
    entropy_coefficient: float = 0.0

    def __post_init__(self) -> None:
        finite(self, "entropy_coefficient")


@dataclass(frozen=True)
class PolicyLoss(RatioLoss):
    """Clipped policy-gradient loss (PPO, GRPO).

    Attributes:
      clip_low: Ratio may fall to 1 - clip_low.
      clip_high: Ratio may rise to 1 + clip_high.
      dual_clip: Bound on the loss of tokens with negative advantage, as a multiple of it; None is off.
    """

    function: ClassVar[Callable[..., Any] | str] = "jaxrlhf.algos.losses:clipped_policy_loss"

    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = 3.0

    def __post_init__(self) -> None:
        super().__post_init__()
        positive(self, "clip_low", "clip_high")
        within(self, "clip_low", 0.0, 1.0)
        require(
            self.dual_clip is None or self.dual_clip > 1,
            f"PolicyLoss.dual_clip must be above 1 or None, got {self.dual_clip}",
        )


@dataclass(frozen=True)
class GSPOLoss(RatioLoss):
    """Clipped loss whose ratio is that of the whole response, per token: the geometric mean of its tokens' ratios.

    Attributes:
      clip_low: The response's ratio may fall to 1 - clip_low. A mean over many tokens moves little, hence the size.
      clip_high: The response's ratio may rise to 1 + clip_high.
      aggregation: `seq-mean-token-mean` only.
    """

    function: ClassVar[Callable[..., Any] | str] = "jaxrlhf.algos.losses:gspo_loss"

    clip_low: float = 3e-4
    clip_high: float = 4e-4
    aggregation: Aggregation = "seq-mean-token-mean"

    def __post_init__(self) -> None:
        super().__post_init__()
        positive(self, "clip_low", "clip_high")
        within(self, "clip_low", 0.0, 1.0)
        require(
            self.aggregation == "seq-mean-token-mean",
            "GSPOLoss has one ratio per response, so each response must count once and not by its tokens: "
            f"aggregation must be 'seq-mean-token-mean', got {self.aggregation!r}",
        )


@dataclass(frozen=True)
class CISPOLoss(RatioLoss):
    """Log-likelihood weighted by a bounded ratio: no token's gradient is dropped, only its weight is bounded.

    Attributes:
      ratio_low: The weight is at least this; 0 is no bound.
      ratio_high: The weight is at most this.
    """

    function: ClassVar[Callable[..., Any] | str] = "jaxrlhf.algos.losses:cispo_loss"

    ratio_low: float = 0.0
    ratio_high: float = 5.0

    def __post_init__(self) -> None:
        super().__post_init__()
        not_negative(self, "ratio_low")
        require(
            self.ratio_low <= 1 <= self.ratio_high,
            "CISPOLoss bounds a ratio that starts at 1: ratio_low <= 1 <= ratio_high must hold, "
            f"got {self.ratio_low} and {self.ratio_high}",
        )


@dataclass(frozen=True)
class SAPOLoss(RatioLoss):
    """A soft gate in place of the clip: gradients fade as the ratio leaves 1.

    Attributes:
      temperature_positive: How fast they fade where the advantage is above 0.
      temperature_negative: Elsewhere; larger, because what pushes a token down pushes all others up.
    """

    function: ClassVar[Callable[..., Any] | str] = "jaxrlhf.algos.losses:sapo_loss"

    temperature_positive: float = 1.0
    temperature_negative: float = 1.05
    aggregation: Aggregation = "seq-mean-token-mean"

    def __post_init__(self) -> None:
        super().__post_init__()
        positive(self, "temperature_positive", "temperature_negative")


@dataclass(frozen=True)
class TruncatedImportance:
    """Weight tokens by min(pi_old / pi_sampler, cap): corrects sampler-trainer mismatch.

    Attributes:
      cap: Bounds the variance, at the price of bias.
      level: `token`: the ratio of each token. `sequence`: the product of the ratios of all tokens of the response, for
        each of them; unbiased without the cap, and of a variance that grows with the length.
    """

    cap: float = 2.0
    level: Literal["token", "sequence"] = "token"

    def __post_init__(self) -> None:
        positive(self, "cap")


@dataclass(frozen=True)
class IcePop:
    """Weight tokens by pi_old / pi_sampler where it lies in [low, high]; the others train nothing."""

    low: float = 0.5
    high: float = 5.0

    def __post_init__(self) -> None:
        not_negative(self, "low")
        require(
            self.low <= 1 <= self.high,
            f"IcePop keeps ratios around 1: low <= 1 <= high must hold, got {self.low} and {self.high}",
        )


@dataclass(frozen=True)
class Rejection:
    """Train nothing on what sampler and trainer see too differently: keep where low <= estimate <= high.

    Denominators go on counting what was rejected.

    Attributes:
      estimator: In nats, with r = log(pi_old / pi_sampler): `k1` is -r, `k2` is r^2 / 2 and `k3` is exp(r) - 1 - r.
      level: `token`: each token by its own estimate. `sequence-mean`, `sequence-sum`: a whole response by that of its
        tokens. `sequence-max`: a whole response, if any of its tokens is outside.
      high: Of the estimate.
      low: Of the estimate; None is -high. To keep geometric means of ratios in [a, b]: `k1`, `sequence-mean`,
        low=-log(b), high=-log(a).
    """

    estimator: Literal["k1", "k2", "k3"] = "k3"
    level: Literal["token", "sequence-mean", "sequence-sum", "sequence-max"] = "sequence-mean"
    high: float = 0.01
    low: float | None = None

    def __post_init__(self) -> None:
        positive(self, "high")
        require(
            self.low is None or self.low <= 0,
            f"Rejection.low must be None or at most 0, the estimate where both agree, got {self.low}",
        )
