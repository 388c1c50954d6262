"""What is done about responses that the trainer's policy would have sampled with other probabilities."""

from dataclasses import dataclass
from typing import Literal

from jaxrlhf.config.refusal import not_negative, positive, require


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
