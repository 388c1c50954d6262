"""Algorithms without a critic."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from jaxrlhf.config.algorithms.algorithm import PolicyGradient
from jaxrlhf.config.losses import CISPOLoss, GSPOLoss, KLInLoss, KLInReward, PolicyLoss, SAPOLoss
from jaxrlhf.config.refusal import require
from jaxrlhf.config.settings import Finite, NotNegative, Positive, Settings, Share

if TYPE_CHECKING:
    from jaxrlhf.config.run import Config


@dataclass(frozen=True)
class GroupCompared(PolicyGradient):
    """Base class of algorithms that compare the responses to one prompt."""

    def check(self, config: Config) -> None:
        super().check(config)
        require(
            config.rollout.responses_per_prompt > 1,
            f"{type(self).__name__} compares the responses to one prompt: rollout.responses_per_prompt must be 2 or "
            f"more, got {config.rollout.responses_per_prompt}",
        )


@dataclass(frozen=True)
class GRPO(GroupCompared):
    """Group-relative policy optimisation (Shao et al. 2024, arXiv:2402.03300).

    Attributes:
      normalize_std: Divide by the group's standard deviation.
    """

    learn: ClassVar[str] = "jaxrlhf.dataflows.grpo:grpo"

    normalize_std: bool = True


@dataclass(frozen=True)
class TurnGRPO(GRPO):
    """GRPO over turns: the rewards to go of a turn are compared with those of the group's episodes in the same turn.

    Attributes:
      gamma: Discount per turn.

    Source: Zeng et al. 2025 (arXiv:2505.11821), section 4.
    """

    learn: ClassVar[str] = "jaxrlhf.dataflows.turn_level:turn_grpo"

    gamma: Share[float] = 1.0

    def check(self, config: Config) -> None:
        super().check(config)
        _check_turns(self, config)


@dataclass(frozen=True)
class GiGPO(GRPO):
    """Group-in-group policy optimisation (Feng et al. 2025, arXiv:2505.10978): GRPO, and credit to turns by state.

    Turns of a group that were made in equal states, as the environment names them, are compared with each other; with
    one turn, or no two equal states, it is GRPO.

    Attributes:
      gamma: Discount per turn of the rewards that a turn is compared by.
      state_weight: Weight of a turn's advantage beside its episode's.
    """

    learn: ClassVar[str] = "jaxrlhf.dataflows.turn_level:gigpo"

    gamma: Share[float] = 0.95
    state_weight: Finite[NotNegative[float]] = 1.0

    def check(self, config: Config) -> None:
        super().check(config)
        _check_turns(self, config)


@dataclass(frozen=True)
class DrGRPO(GRPO):
    """GRPO done right (Liu et al. 2025, arXiv:2503.20783): GRPO without its bias for some lengths and difficulties."""

    normalize_std: bool = False
    policy: PolicyLoss = field(default_factory=lambda: PolicyLoss(aggregation="seq-mean-token-sum-norm"))


@dataclass(frozen=True)
class GSPO(GRPO):
    """Group sequence policy optimisation (Zheng et al. 2025, arXiv:2507.18071): GRPO with one ratio per response."""

    takes_several_sequences: ClassVar[bool] = False

    policy: GSPOLoss = field(default_factory=GSPOLoss)


@dataclass(frozen=True)
class CISPO(GRPO):
    """Clipped importance sampling (MiniMax 2025, arXiv:2506.13585): GRPO in which no token loses its gradient."""

    policy: CISPOLoss = field(default_factory=CISPOLoss)


@dataclass(frozen=True)
class SAPO(GRPO):
    """Soft adaptive policy optimisation (Gao et al. 2025, arXiv:2511.20347): GRPO with a soft gate for the clip."""

    policy: SAPOLoss = field(default_factory=SAPOLoss)


@dataclass(frozen=True)
class RLOO(GroupCompared):
    """REINFORCE with a leave-one-out baseline (Ahmadian et al. 2024, arXiv:2402.14740)."""

    learn: ClassVar[str] = "jaxrlhf.dataflows.grpo:rloo"

    kl: KLInReward | KLInLoss | None = field(default_factory=KLInReward)


@dataclass(frozen=True)
class OPO(GroupCompared):
    """On-policy RL with an optimal baseline, optimal for one update a step (Hao et al. 2025, arXiv:2505.23585)."""

    learn: ClassVar[str] = "jaxrlhf.dataflows.grpo:opo"


@dataclass(frozen=True)
class GPG(GroupCompared):
    """Group policy gradient (Chu et al. 2025, arXiv:2504.02546), with a clipped ratio if a step has several updates."""

    learn: ClassVar[str] = "jaxrlhf.dataflows.grpo:gpg"


@dataclass(frozen=True)
class ReinforcePlusPlus(PolicyGradient):
    """REINFORCE++: no groups, advantages whitened over the batch (Hu et al. 2025, arXiv:2501.03262).

    Attributes:
      gamma: Discount per action token.
    """

    learn: ClassVar[str] = "jaxrlhf.dataflows.grpo:reinforce_plus_plus"

    kl: KLInReward | KLInLoss | None = field(default_factory=KLInReward)
    gamma: Share[float] = 1.0


@dataclass(frozen=True)
class ReinforcePlusPlusBaseline(GroupCompared):
    """REINFORCE++ with the group's mean as the baseline (Hu et al. 2025, arXiv:2501.03262)."""

    learn: ClassVar[str] = "jaxrlhf.dataflows.grpo:reinforce_plus_plus_baseline"

    kl: KLInReward | KLInLoss | None = field(default_factory=lambda: KLInLoss(estimator="k2"))


@dataclass(frozen=True)
class ReMax(PolicyGradient):
    """REINFORCE with the score of a further, greedy response as the baseline (Li et al. 2024, arXiv:2310.10505)."""

    collect: ClassVar[str] = "jaxrlhf.dataflows.grpo:greedy_and_sampled"
    learn: ClassVar[str] = "jaxrlhf.dataflows.grpo:remax"

    kl: KLInReward | KLInLoss | None = field(default_factory=KLInReward)


@dataclass(frozen=True)
class OverlongPunishment(Settings):
    """Soft punishment of overlong responses: grows from 0 to `factor` over the last tokens and lowers the score.

    Attributes:
      buffer_share: Share of `max_response_tokens` over which it grows.
    """

    buffer_share: Share[Positive[float]] = 0.2
    factor: Positive[float] = 1.0


@dataclass(frozen=True)
class DAPO(GroupCompared):
    """Decoupled clip and dynamic sampling policy optimisation (Yu et al. 2025, arXiv:2503.14476).

    Groups whose responses all score the same are replaced by those of further prompts, `prompts_per_step` at a time,
    until `max_rounds` are over; then what is missing is left out of the update.

    Attributes:
      max_rounds: Times that a step draws prompts, at most; 1 replaces nothing.
      overlong: Punishment of long responses, left out of the comparison of scores.
      mask_truncated: Overlong filtering: train nothing on truncated responses; they stay in the baseline.
    """

    collect: ClassVar[str] = "jaxrlhf.dataflows.dapo:collect"
    learn: ClassVar[str] = "jaxrlhf.dataflows.dapo:learn"

    policy: PolicyLoss = field(default_factory=lambda: PolicyLoss(clip_high=0.28))
    max_rounds: Positive[int] = 10
    overlong: OverlongPunishment | None = field(default_factory=OverlongPunishment)
    mask_truncated: bool = False


def _check_turns(settings: PolicyGradient, config: Config) -> None:
    require(
        config.environment is not None,
        f"{type(settings).__name__} gives credit to the turns of episodes, and the run has no environment; give one, "
        "or choose GRPO",
    )
