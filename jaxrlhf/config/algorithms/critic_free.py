"""Settings of algorithms without a critic."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from jaxrlhf.config.algorithms.algorithm import PolicyGradient, check_whole_responses
from jaxrlhf.config.environments import AnyEnvironment, Environment, choices
from jaxrlhf.config.losses import CISPOLoss, GMPOLoss, GSPOLoss, KLInLoss, KLInReward, PolicyLoss, SAPOLoss
from jaxrlhf.config.refusal import Refusal, require
from jaxrlhf.config.roles import REWARD, RoleSpec, actor, reference
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
    """Group-relative policy optimization (Shao et al. 2024, arXiv:2402.03300).

    Attributes:
      normalize_std: True divides advantages by the standard deviation of the group's scores.
    """

    learn: ClassVar[str] = "jaxrlhf.dataflows.grpo:grpo"
    advantage_of_group: ClassVar[bool] = True

    normalize_std: bool = True


@dataclass(frozen=True)
class TurnGRPO(GRPO):
    """GRPO per turn: the reward-to-go of a turn is compared with the same turn in the group's other episodes.

    Attributes:
      gamma: Discount per turn.

    Source: Zeng et al. 2025 (arXiv:2505.11821), section 4.
    """

    learn: ClassVar[str] = "jaxrlhf.dataflows.turn_level:turn_grpo"

    gamma: Share[float] = 1.0

    def check(self, config: Config) -> None:
        super().check(config)
        _environment_of_turns(self, config)


@dataclass(frozen=True)
class GiGPO(GRPO):
    """Group-in-group policy optimization (Feng et al. 2025, arXiv:2505.10978): GRPO plus credit to turns by state.

    Turns of a group that start from equal states, as named by the environment, are compared with each other. With one
    turn per episode, or without equal states, it is GRPO.

    Attributes:
      gamma: Discount per turn of the rewards-to-go by which turns are compared.
      state_weight: Weight of a turn's state-level advantage, added to the advantage of its episode.
    """

    learn: ClassVar[str] = "jaxrlhf.dataflows.turn_level:gigpo"

    gamma: Share[float] = 0.95
    state_weight: Finite[NotNegative[float]] = 1.0

    def check(self, config: Config) -> None:
        super().check(config)
        environments = choices(_environment_of_turns(self, config))
        require(
            any(isinstance(one, Environment) for one in environments),
            "GiGPO compares turns that were made in one state, and tools and agent programs name no states; give an "
            "Environment that sets Observation.state, or choose GRPO or TurnGRPO",
        )


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
    advantage_of_group: ClassVar[bool] = True

    kl: KLInReward | KLInLoss | None = field(default_factory=KLInReward)


@dataclass(frozen=True)
class OPO(GroupCompared):
    """On-policy RL with a baseline that is optimal for one update per step (Hao et al. 2025, arXiv:2505.23585)."""

    learn: ClassVar[str] = "jaxrlhf.dataflows.grpo:opo"
    advantage_of_group: ClassVar[bool] = True


@dataclass(frozen=True)
class GPG(GroupCompared):
    """Group policy gradient (Chu et al. 2025, arXiv:2504.02546), with a clipped ratio if a step has several updates."""

    learn: ClassVar[str] = "jaxrlhf.dataflows.grpo:gpg"


@dataclass(frozen=True)
class GRPOPassK(GRPO):
    """GRPO for the best response of a group: pass@k, with k the group size (Tang et al. 2025, arXiv:2503.19595)."""

    learn: ClassVar[str] = "jaxrlhf.dataflows.group_baselines:grpo_passk"


@dataclass(frozen=True)
class MaxRL(GroupCompared):
    """Maximum likelihood of success (Tajwar et al. 2026, arXiv:2602.02710); scores must be 0 or more."""

    learn: ClassVar[str] = "jaxrlhf.dataflows.group_baselines:maxrl"
    advantage_of_group: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            not isinstance(self.kl, KLInReward),
            f"MaxRL divides by the mean score of a group, a share of successes, and kl={self.kl} would charge every "
            "token, down to below 0; give KLInLoss",
        )


@dataclass(frozen=True)
class GDPO(GroupCompared):
    """GRPO with each reward normalized separately before the rewards are added (Liu et al. 2026, arXiv:2601.05242)."""

    learn: ClassVar[str] = "jaxrlhf.dataflows.group_baselines:gdpo"

    def check(self, config: Config) -> None:
        super().check(config)
        weighed = sum(part.weight != 0 for part in config.rewards.parts) + (config.environment is not None)
        require(
            weighed > 1,
            f"GDPO normalises several rewards by themselves, and rewards has {weighed} of a weight that is not 0; add "
            "one, or choose GRPO",
        )
        own = [source.name for source in config.sources if source.rewards is not None]
        require(
            not own,
            f"GDPO normalises each of the run's rewards, and sources {', '.join(own)} have others in their place; give "
            "all sources the same, or choose GRPO",
        )
        require(
            not isinstance(self.kl, KLInReward),
            f"GDPO normalises rewards of whole responses, and kl={self.kl} would charge every token; give KLInLoss",
        )


@dataclass(frozen=True)
class OptimalTokenBaseline(GroupCompared):
    """REINFORCE with a minimum-variance baseline for each token position (Li et al. 2026, arXiv:2602.07078).

    A forward pass of the actor before the update measures the gradient variance of each token. Positions count the
    policy's tokens over all turns of an episode, without the text between turns.
    """

    learn: ClassVar[str] = "jaxrlhf.dataflows.group_baselines:optimal_token_baseline"
    further_passes: ClassVar[tuple[str, ...]] = ("actor",)


@dataclass(frozen=True)
class OnlineDPO(GroupCompared):
    """DPO on the policy's responses: best against worst response to a prompt (Guo et al. 2024, arXiv:2402.04792).

    Rewards rank the responses, including judges and reward models. The update is a policy gradient with the derivative
    of DPO's loss as the advantage, so a step is one update. The reference is always loaded; `kl` must be None.

    Attributes:
      beta: Strength of the pull to the reference.
      policy: Policy loss; token losses are summed over a response, so `aggregation` must be `seq-mean-token-sum`.
    """

    learn: ClassVar[str] = "jaxrlhf.dataflows.group_baselines:online_dpo"

    beta: Positive[float] = 0.1
    policy: PolicyLoss = field(default_factory=lambda: PolicyLoss(aggregation="seq-mean-token-sum"))

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole_responses(self)

    def roles(self, config: Config) -> tuple[RoleSpec, ...]:
        return (actor(config.actor), reference(), REWARD)

    def check(self, config: Config) -> None:
        super().check(config)
        updates = self.updates_per_step(config)
        require(
            updates == 1,
            f"OnlineDPO takes the slope of its loss once a step, and there are {updates} updates; set "
            f"algorithm.responses_per_update to {config.rollout.responses_per_step} and epochs_per_step to 1",
        )


@dataclass(frozen=True)
class RAE(PolicyGradient):
    """Self-play of zero-sum games with a baseline for each role (Liu et al. 2025, SPIRAL, arXiv:2506.24119).

    One policy plays both sides: turns 0, 2, ... of an episode are the first player's, turns 1, 3, ... the second's. A
    reward of the environment for a turn counts for the player of that turn and against the other player; the rest of
    the score belongs to the last turn. Each player of each game has its own baseline, a moving average.

    Attributes:
      decay: Decay of the baselines per step.
    """

    learn: ClassVar[str] = "jaxrlhf.dataflows.turn_level:rae"

    decay: Share[float] = 0.95

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            not isinstance(self.kl, KLInReward),
            f"RAE takes what a player is paid from the other, and kl={self.kl} would have one gain by the other's KL; "
            "give KLInLoss",
        )

    def check(self, config: Config) -> None:
        super().check(config)
        require(
            config.environment is not None,
            "RAE plays games in turns, and the run has no environment; give one, or choose ReinforcePlusPlus",
        )


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

    collect: ClassVar[str] = "jaxrlhf.dataflows.grpo:greedy_and_sampled"
    learn: ClassVar[str] = "jaxrlhf.dataflows.grpo:remax"
    draws_beside: ClassVar[str | None] = "greedy answers"

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


def _environment_of_turns(settings: PolicyGradient, config: Config) -> AnyEnvironment:
    """Return the environment whose turns get credit; raise `Refusal` if the run has none."""
    if config.environment is None:
        raise Refusal(
            f"{type(settings).__name__} gives credit to the turns of episodes, and the run has no environment; give "
            "one, or choose GRPO"
        )
    return config.environment
