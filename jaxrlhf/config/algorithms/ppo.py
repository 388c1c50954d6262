"""Settings of PPO."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal

from jaxrlhf.config.algorithms.algorithm import PolicyGradient
from jaxrlhf.config.losses import ValueLoss
from jaxrlhf.config.refusal import require
from jaxrlhf.config.roles import RoleSpec, critic
from jaxrlhf.config.settings import NotNegative, Share
from jaxrlhf.config.sources import Pretrained
from jaxrlhf.config.training import Optimizer, Training

if TYPE_CHECKING:
    from jaxrlhf.config.run import Config


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

    def roles(self, config: Config) -> tuple[RoleSpec, ...]:
        actor, *others = super().roles(config)
        return (actor, critic(self.critic, self.critic_model), *others)

    def resting_updates(self, config: Config) -> int:
        return self.critic_warmup_steps * self.updates_per_step(config)

    def check(self, config: Config) -> None:
        super().check(config)
        require(
            self.critic_warmup_steps < config.steps,
            f"algorithm.critic_warmup_steps={self.critic_warmup_steps} leaves no step of steps={config.steps} to "
            "train the policy; lower algorithm.critic_warmup_steps or raise steps",
        )
        require(
            self.actions == "tokens" or config.environment is not None,
            "algorithm.actions='turns' requires an environment, because a run without an environment has only one "
            "turn; set environment, or algorithm.actions='tokens'",
        )
