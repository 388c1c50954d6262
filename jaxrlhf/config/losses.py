"""Policy losses, KL to the reference, the critic's loss, and corrections for sampler-trainer mismatch."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from jaxrlhf.config.refusal import require
from jaxrlhf.config.settings import Bound, Finite, OneOrMore, Positive, Settings, Share

Aggregation = Literal[
    "token-mean", "token-sum", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm", "prompt-mean"
]
KLEstimator = Literal["k1", "abs", "k2", "k3", "k1+", "k3+"]


@dataclass(frozen=True)
class AdaptiveKL(Settings):
    """Adaptive KL coefficient that steers the KL towards a target (Ziegler et al. 2019, arXiv:1909.08593, section 2.2).

    Attributes:
      target: Target of the mean k1 estimate per action token, in nats; the paper's target is the sum over a response.
      horizon: Number of responses over which the coefficient grows or shrinks by at most about a fifth.
    """

    target: Positive[float] = 0.1
    horizon: Positive[int] = 10_000


@dataclass(frozen=True)
class KLInReward(Settings):
    """KL penalty in the reward: `coefficient * kl` to the reference policy is subtracted from each token's reward.

    Attributes:
      estimator: Estimator, with d = logp - ref_logp: `k1` is d, `abs` is |d|, `k2` is d^2 / 2, `k3` is exp(-d) - 1 + d.
    """

    coefficient: Positive[float] = 0.001
    estimator: Literal["k1", "abs", "k2", "k3"] = "k1"
    adaptive: AdaptiveKL | None = None


@dataclass(frozen=True)
class KLInLoss(Settings):
    """KL penalty in the loss: `coefficient * kl` to the reference policy is added to each token's loss.

    Attributes:
      estimator: Estimator, with d = logp - ref_logp: `k1` is d, `abs` is |d|, `k2` is d^2 / 2, `k3` is exp(-d) - 1 + d.
        `k1+` and `k3+` have the value of k1 and k3 and the gradient of k2, which is the gradient of the reverse KL. The
        gradient of `k1` alone is 0 in expectation, so it has no effect.
    """

    coefficient: Positive[float] = 0.001
    estimator: KLEstimator = "k3"
    adaptive: AdaptiveKL | None = None


@dataclass(frozen=True)
class ValueLoss(Settings):
    """Clipped value regression: the new value is clipped to at most `clip`, in reward units, from the old value."""

    clip: Positive[float] = 0.5


@dataclass(frozen=True, kw_only=True)
class RatioLoss(Settings):
    """Base class of policy losses; subclass it for a new loss.

    Class attributes:
      function: Loss of one token: a function of `PolicyTokens` and these settings that returns `PolicyTerms` (see
        `jaxrlhf.algos`), or its name as `module:function`.
      one_ratio: True if a response has one ratio; responses then have equal weights, and the only aggregation is
        `seq-mean-token-mean`.

    Attributes:
      aggregation: Loss aggregation; every count is over the whole update. `token-mean`: sum over the number of trained
        tokens (DAPO). `token-sum`: sum. `seq-mean-token-mean`: mean within each response, then over responses (GRPO).
        `seq-mean-token-sum`: sum within each response, then mean over responses. `seq-mean-token-sum-norm`:
        `seq-mean-token-sum` divided by `max_response_tokens` (Dr. GRPO). `prompt-mean`: token-mean over each prompt's
        responses, then mean over prompts.
      entropy_coefficient: Weight of the entropy bonus; 0 computes no entropy.
    """

    function: ClassVar[Callable[..., Any] | str]
    one_ratio: ClassVar[bool] = False

    aggregation: Aggregation = "token-mean"
    entropy_coefficient: Finite[float] = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            not self.one_ratio or self.aggregation == "seq-mean-token-mean",
            f"{type(self).__name__} has one ratio per response, so responses must have equal weights: aggregation must "
            f"be 'seq-mean-token-mean', got {self.aggregation!r}",
        )


@dataclass(frozen=True)
class PolicyLoss(RatioLoss):
    """Clipped policy-gradient loss (PPO, GRPO).

    Attributes:
      clip_low: Lower clip range: the ratio is clipped at 1 - clip_low.
      clip_high: Upper clip range: the ratio is clipped at 1 + clip_high.
      dual_clip: Dual clip: upper bound of the loss of tokens with negative advantage, as a multiple of -advantage; None
        is off.
    """

    function: ClassVar[Callable[..., Any] | str] = "jaxrlhf.algos.losses:clipped_policy_loss"

    clip_low: Share[Positive[float]] = 0.2
    clip_high: Positive[float] = 0.2
    dual_clip: Annotated[float, Bound(lambda value: value > 1, "above 1")] | None = 3.0


@dataclass(frozen=True)
class GSPOLoss(RatioLoss):
    """Clipped loss with one ratio per response: the geometric mean of its tokens' ratios (GSPO).

    Attributes:
      clip_low: Lower clip range of the response's ratio; small, because a mean over many tokens moves little.
      clip_high: Upper clip range of the response's ratio.
      aggregation: `seq-mean-token-mean` only.
    """

    function: ClassVar[Callable[..., Any] | str] = "jaxrlhf.algos.losses:gspo_loss"
    one_ratio: ClassVar[bool] = True

    clip_low: Share[Positive[float]] = 3e-4
    clip_high: Positive[float] = 4e-4
    aggregation: Aggregation = "seq-mean-token-mean"


@dataclass(frozen=True)
class CISPOLoss(RatioLoss):
    """Log-likelihood weighted by a clipped importance ratio, so that no token loses its gradient (CISPO).

    A ratio starts at 1, so the bounds are at most 1 and at least 1.

    Attributes:
      ratio_low: Smallest importance weight; 0 is no bound.
      ratio_high: Largest importance weight.
    """

    function: ClassVar[Callable[..., Any] | str] = "jaxrlhf.algos.losses:cispo_loss"

    ratio_low: Share[float] = 0.0
    ratio_high: OneOrMore[float] = 5.0


@dataclass(frozen=True)
class SAPOLoss(RatioLoss):
    """Soft gate in place of the clip: gradients fade as the ratio moves away from 1 (SAPO).

    Attributes:
      temperature_positive: Speed of the fading for tokens with positive advantage.
      temperature_negative: Speed of the fading for other tokens; larger, because pushing one token down pushes all
        others up.
    """

    function: ClassVar[Callable[..., Any] | str] = "jaxrlhf.algos.losses:sapo_loss"

    temperature_positive: Positive[float] = 1.0
    temperature_negative: Positive[float] = 1.05
    aggregation: Aggregation = "seq-mean-token-mean"


@dataclass(frozen=True)
class GMPOLoss(RatioLoss):
    """Geometric mean of a response's ratios, each clipped first (GMPO).

    Attributes:
      clip_low: Largest decrease of a token's log-ratio that counts, in nats.
      clip_high: Largest increase of a token's log-ratio that counts, in nats.
      aggregation: `seq-mean-token-mean` only.
    """

    function: ClassVar[Callable[..., Any] | str] = "jaxrlhf.algos.losses:gmpo_loss"
    one_ratio: ClassVar[bool] = True

    clip_low: Positive[float] = 0.4
    clip_high: Positive[float] = 0.4
    aggregation: Aggregation = "seq-mean-token-mean"


@dataclass(frozen=True)
class DPPOLoss(RatioLoss):
    """Trust region on probabilities in place of ratios: tokens outside of it lose their gradient (DPPO).

    Attributes:
      divergence: Distance between a token's old and new probability: `tv` is their absolute difference, `kl` is the KL
        of the binary distributions (this token or another).
      limit_low: Largest distance for tokens with negative advantage whose probability decreased; for `kl` use about
        0.05.
      limit_high: Largest distance for tokens with positive advantage whose probability increased.
      ratio_high: Largest importance weight of tokens inside the trust region.
    """

    function: ClassVar[Callable[..., Any] | str] = "jaxrlhf.algos.losses:dppo_loss"

    divergence: Literal["tv", "kl"] = "tv"
    limit_low: Positive[float] = 0.2
    limit_high: Positive[float] = 0.2
    ratio_high: OneOrMore[float] = 20.0


@dataclass(frozen=True)
class DROLoss(RatioLoss):
    """Log-likelihood weighted by the advantage, with a quadratic penalty to the old policy in place of the clip (DRO).

    Attributes:
      beta: Strength of the penalty.
    """

    function: ClassVar[Callable[..., Any] | str] = "jaxrlhf.algos.losses:dro_loss"

    beta: Positive[float] = 0.05


@dataclass(frozen=True)
class TruncatedImportance(Settings):
    """Truncated importance sampling (TIS): tokens are weighted by min(pi_old / pi_sampler, cap).

    Attributes:
      cap: Largest weight; it bounds the variance, at the cost of bias.
      level: Ratio of each `token`, or the ratio of the whole `sequence` for each of its tokens. The sequence ratio is
        unbiased without the cap, and its variance grows with the length.
    """

    cap: Positive[float] = 2.0
    level: Literal["token", "sequence"] = "token"


@dataclass(frozen=True)
class IcePop(Settings):
    """IcePop weights: pi_old / pi_sampler of a token if it is in [low, high]; other tokens are not trained on."""

    low: Share[float] = 0.5
    high: OneOrMore[float] = 5.0


@dataclass(frozen=True)
class Rejection(Settings):
    """Rejection sampling for sampler-trainer mismatch: only tokens with low <= estimate <= high are trained on.

    Rejected tokens still count in the denominators of means. To keep geometric means of ratios in [a, b], use `k1`,
    `sequence-mean`, low=-log(b), high=-log(a).

    Attributes:
      estimator: Estimate of the mismatch in nats, with r = log(pi_old / pi_sampler): `k1` is -r, `k2` is r^2 / 2 and
        `k3` is exp(r) - 1 - r.
      level: Unit of rejection. `token`: each token by its own estimate. `sequence-mean`, `sequence-sum`: a whole
        response by the mean or sum of its tokens' estimates. `sequence-max`: a whole response if any of its tokens is
        outside.
      high: Largest estimate that is kept.
      low: Smallest estimate that is kept; None is -high.
    """

    estimator: Literal["k1", "k2", "k3"] = "k3"
    level: Literal["token", "sequence-mean", "sequence-sum", "sequence-max"] = "sequence-mean"
    high: Positive[float] = 0.01
    low: Annotated[float, Bound(lambda value: value <= 0, "0 or less (equal policies have 0)")] | None = None
