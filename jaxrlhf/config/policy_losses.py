"""The losses of a policy: a dataclass for each, with the settings of its own function and no other's."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from jaxrlhf.config.losses import Aggregation
from jaxrlhf.config.refusal import finite, not_negative, positive, require, within


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
