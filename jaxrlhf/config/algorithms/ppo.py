"""Settings of PPO, and of VAPO: PPO for long chains of thought."""

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from jaxrlhf.config.algorithms.algorithm import PolicyGradient
from jaxrlhf.config.losses import PolicyLoss, ValueLoss
from jaxrlhf.config.roles import RoleSpec, critic
from jaxrlhf.config.settings import Finite, NotNegative, Positive, Share
from jaxrlhf.config.sources import Pretrained
from jaxrlhf.config.training import Optimizer, Rollout, Training


@dataclass(frozen=True)
class PPO(PolicyGradient):
    """Proximal policy optimization with a learned critic (Schulman et al. 2017, arXiv:1707.06347).

    Attributes:
      gamma: Discount per action.
      lam: Lambda of generalized advantage estimation (GAE).
      actions: Unit of an action: `tokens`, or `turns` of an episode, in which every token has the advantage of its
        turn.
      critic_model: Checkpoint that the critic's trunk starts from; None copies the actor's.
      critic_warmup_steps: Number of steps at the start in which only the critic is updated.
    """

    learn: ClassVar[str] = "jaxrlhf.dataflows.ppo:learn"

    gamma: Share[float] = 1.0
    lam: Share[float] = 1.0
    actions: Literal["tokens", "turns"] = "tokens"
    value: ValueLoss = field(default_factory=ValueLoss)
    critic: Training = field(default_factory=lambda: Training(optimizer=Optimizer(learning_rate=1e-5)))
    critic_model: Pretrained | None = None
    critic_warmup_steps: NotNegative[int] = 0

    def roles(self, training: Training) -> tuple[RoleSpec, ...]:
        actor, *others = super().roles(training)
        return (actor, critic(self.critic, self.critic_model), *others)

    def critic_only_updates(self, rollout: Rollout) -> int:
        return self.critic_warmup_steps * self.updates_per_step(rollout)


@dataclass(frozen=True)
class VAPO(PPO):
    """Value-augmented PPO (Yue et al. 2025, arXiv:2504.05118).

    The critic learns from Monte Carlo returns (`lam` is its lambda), in the first `critic_warmup_steps` without the
    policy. The policy's lambda depends on the response length; its loss clips higher and imitates successful responses.

    Attributes:
      length_scale: alpha in the policy's lambda = 1 - 1 / (alpha * length), with the length counted in `actions`.
      imitation: Weight of the mean -logp of the tokens of responses with a score above `success`.
      success: Score above which a response is imitated.
    """

    learn: ClassVar[str] = "jaxrlhf.dataflows.vapo:learn"

    policy: PolicyLoss = field(default_factory=lambda: PolicyLoss(clip_high=0.28))
    critic_warmup_steps: NotNegative[int] = 50
    length_scale: Positive[float] = 0.05
    imitation: NotNegative[float] = 0.1
    success: Finite[float] = 0.0
