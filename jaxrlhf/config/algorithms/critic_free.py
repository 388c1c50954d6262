"""Settings of algorithms without a critic."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from jaxrlhf.config.algorithms.algorithm import PolicyGradient, check_whole_responses
from jaxrlhf.config.losses import CISPOLoss, GMPOLoss, GSPOLoss, KLInLoss, KLInReward, PolicyLoss, SAPOLoss
from jaxrlhf.config.roles import REWARD, RoleSpec, actor, reference
from jaxrlhf.config.settings import Positive, Settings, Share
from jaxrlhf.config.training import Training


@dataclass(frozen=True)
class GroupCompared(PolicyGradient):
    """Base class of algorithms that compare the responses to one prompt."""


@dataclass(frozen=True)
class GRPO(GroupCompared):
    """Group-relative policy optimization (Shao et al. 2024, arXiv:2402.03300).

    Attributes:
      normalize_std: True divides advantages by the standard deviation of the group's scores.
    """

    learn: ClassVar[Callable[..., Any] | str] = "jaxrlhf.dataflows.grpo:grpo"

    normalize_std: bool = True


@dataclass(frozen=True)
class DrGRPO(GRPO):
    """GRPO done right (Liu et al. 2025, arXiv:2503.20783): GRPO without its bias by length and difficulty."""

    normalize_std: bool = False
    policy: PolicyLoss = field(default_factory=lambda: PolicyLoss(aggregation="seq-mean-token-sum-norm"))


@dataclass(frozen=True)
class GSPO(GRPO):
    """Group sequence policy optimization (Zheng et al. 2025, arXiv:2507.18071): GRPO with one ratio per response."""

    policy: GSPOLoss = field(default_factory=GSPOLoss)


@dataclass(frozen=True)
class GMPO(GRPO):
    """Geometric-mean policy optimization (Zhao et al. 2025, arXiv:2507.20673): GRPO with a mean of clipped ratios."""

    policy: GMPOLoss = field(default_factory=GMPOLoss)


@dataclass(frozen=True)
class CISPO(GRPO):
    """Clipped importance sampling (MiniMax 2025, arXiv:2506.13585): GRPO in which no token loses its gradient."""

    policy: CISPOLoss = field(default_factory=CISPOLoss)


@dataclass(frozen=True)
class SAPO(GRPO):
    """Soft adaptive policy optimization (Gao et al. 2025, arXiv:2511.20347): GRPO with a soft gate for the clip."""

    policy: SAPOLoss = field(default_factory=SAPOLoss)


@dataclass(frozen=True)
class RLOO(GroupCompared):
    """REINFORCE with a leave-one-out baseline (Ahmadian et al. 2024, arXiv:2402.14740)."""

    learn: ClassVar[str] = "jaxrlhf.dataflows.grpo:rloo"

    kl: KLInReward | KLInLoss | None = field(default_factory=KLInReward)


@dataclass(frozen=True)
class OPO(GroupCompared):
    """On-policy RL with a baseline that is optimal for one update per step (Hao et al. 2025, arXiv:2505.23585)."""

    learn: ClassVar[str] = "jaxrlhf.dataflows.group_baselines:opo"


@dataclass(frozen=True)
class GPG(GroupCompared):
    """Group policy gradient (Chu et al. 2025, arXiv:2504.02546), with a clipped ratio if a step has several updates."""

    learn: ClassVar[str] = "jaxrlhf.dataflows.group_baselines:gpg"


@dataclass(frozen=True)
class GRPOPassK(GRPO):
    """GRPO for the best response of a group: pass@k, with k the group size (Tang et al. 2025, arXiv:2503.19595)."""

    learn: ClassVar[str] = "jaxrlhf.dataflows.group_baselines:grpo_passk"


@dataclass(frozen=True)
class OnlineDPO(GroupCompared):
    """DPO on the policy's responses: best against worst response to a prompt (Guo et al. 2024, arXiv:2402.04792).

    Rewards rank the responses, including judges and reward models. The update is a policy gradient with the derivative
    of DPO's loss as the advantage, so a step is one update. The reference is always loaded; `kl` must be None.

    Attributes:
      beta: Strength of the KL penalty to the reference.
      policy: Policy loss; token losses are summed over a response, so `aggregation` must be `seq-mean-token-sum`.
    """

    learn: ClassVar[str] = "jaxrlhf.dataflows.group_baselines:online_dpo"

    beta: Positive[float] = 0.1
    policy: PolicyLoss = field(default_factory=lambda: PolicyLoss(aggregation="seq-mean-token-sum"))

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole_responses(self)

    def roles(self, training: Training) -> tuple[RoleSpec, ...]:
        return (actor(training), reference(), REWARD)


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
    """REINFORCE with the score of an additional greedy response as the baseline (Li et al. 2024, arXiv:2310.10505)."""

    collect: ClassVar[str] = "jaxrlhf.dataflows.remax:collect"
    learn: ClassVar[str] = "jaxrlhf.dataflows.remax:learn"
    also_generates: ClassVar[str | None] = "greedy answers"

    kl: KLInReward | KLInLoss | None = field(default_factory=KLInReward)


@dataclass(frozen=True)
class OverlongPunishment(Settings):
    """Soft punishment of overlong responses: a penalty on the score that grows from 0 to `factor` over the last tokens.

    Attributes:
      buffer_share: Share of `max_response_tokens`, at the end, over which the penalty grows.
    """

    buffer_share: Share[Positive[float]] = 0.2
    factor: Positive[float] = 1.0


@dataclass(frozen=True)
class DAPO(GroupCompared):
    """Decoupled clip and dynamic sampling policy optimization (Yu et al. 2025, arXiv:2503.14476).

    Groups whose responses all have the same score are replaced by groups of further prompts, `prompts_per_step` at a
    time, in at most `max_rounds` rounds. If too few groups remain, the update is over fewer groups.

    Attributes:
      max_rounds: Largest number of times that a step samples prompts; 1 replaces no groups.
      overlong: Punishment of long responses; it does not count when scores of a group are compared.
      mask_truncated: Overlong filtering: True does not train on truncated responses; they still count in the baseline.
    """

    collect: ClassVar[str] = "jaxrlhf.dataflows.dapo:collect"
    learn: ClassVar[str] = "jaxrlhf.dataflows.dapo:learn"

    policy: PolicyLoss = field(default_factory=lambda: PolicyLoss(clip_high=0.28))
    max_rounds: Positive[int] = 10
    overlong: OverlongPunishment | None = field(default_factory=OverlongPunishment)
    mask_truncated: bool = False
