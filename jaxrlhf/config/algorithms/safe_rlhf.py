"""Settings of Safe RLHF: PPO with a limit on a cost."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import ClassVar

from jaxrlhf.config.algorithms.ppo import PPO
from jaxrlhf.config.losses import KLInLoss, KLInReward
from jaxrlhf.config.refusal import require
from jaxrlhf.config.roles import RoleSpec, critic
from jaxrlhf.config.settings import Finite, NotNegative, Positive, Settings
from jaxrlhf.config.sources import Arithmetic, DataSet, Generated, Gsm8k, Pretrained, PromptFields, Shapes
from jaxrlhf.config.training import Optimizer, Rollout, Training


@dataclass(frozen=True)
class Constraint(Settings):
    """Limit on the mean cost of responses, enforced by a Lagrange multiplier.

    Attributes:
      part: Index of the cost in `rewards.parts`. The cost is above 0 for unsafe responses. Its reward weight must be 0,
        because the multiplier weights it.
      limit: Largest mean cost.
      multiplier: Initial multiplier, in units of reward per unit of cost.
      learning_rate: Step size of gradient ascent on the multiplier's logarithm, before each update.
      largest_multiplier: Upper bound of the multiplier.
      delay_steps: Number of steps at the start that leave the multiplier unchanged.
    """

    part: NotNegative[int] = 1
    limit: Finite[float] = 0.0
    multiplier: Positive[float] = 1.0
    learning_rate: Positive[float] = 0.1
    largest_multiplier: Finite[float] = 5.0
    delay_steps: NotNegative[int] = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.multiplier <= self.largest_multiplier,
            f"Constraint.multiplier={self.multiplier} is above largest_multiplier={self.largest_multiplier}",
        )


@dataclass(frozen=True)
class Ptx(Settings):
    """Worked solutions that each update imitates in addition to its responses, at the rollout's temperature (PPO-ptx).

    Attributes:
      data: Data set with worked solutions; its training split is used.
      coefficient: Weight of the mean -logp per token of the solutions.
      examples_per_update: Number of solutions in one optimizer update.
    """

    data: DataSet = field(default_factory=Arithmetic)
    coefficient: Positive[float] = 1.0
    examples_per_update: Positive[int] = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        solved = (
            isinstance(self.data, Arithmetic | Generated | Gsm8k | Shapes)
            or getattr(self.data, "solution_key", None) is not None
        )
        fields = "solution_key is None; set it to the field with the solutions"
        other = "no worked solutions; give Arithmetic, Gsm8k or PromptFile"
        why = fields if isinstance(self.data, PromptFields) else other
        require(solved, f"Ptx imitates worked solutions, but data is {type(self.data).__name__}: {why}")


@dataclass(frozen=True)
class SafeRLHF(PPO):
    """PPO-Lagrangian: highest reward at a mean cost below a limit (Dai et al. 2023, arXiv:2310.12773).

    A second critic estimates costs. A KL in the reward is subtracted from rewards and added to costs. The paper charges
    half of the KL to each; halve the coefficient for this.

    Attributes:
      cost_critic: Training of the cost critic.
      cost_critic_model: Checkpoint that the cost critic's trunk starts from; None copies the actor's.
      clip_rewards: Bound on the absolute value of a token's reward and cost, KL included.
      ptx: Worked solutions that preserve the policy's other abilities; None uses none.
    """

    learn: ClassVar[str] = "jaxrlhf.dataflows.safe_rlhf:learn"
    removed: ClassVar[Mapping[str, str]] = MappingProxyType({"halve_kl": "halve the coefficient of kl instead"})

    kl: KLInReward | KLInLoss | None = field(default_factory=lambda: KLInReward(coefficient=0.02))
    constraint: Constraint = field(default_factory=Constraint)
    cost_critic: Training = field(default_factory=lambda: Training(optimizer=Optimizer(learning_rate=1e-5)))
    cost_critic_model: Pretrained | None = None
    clip_rewards: Positive[float] = 50.0
    ptx: Ptx | None = None

    def roles(self, training: Training) -> tuple[RoleSpec, ...]:
        actor, values, *others = super().roles(training)
        return (actor, values, critic(self.cost_critic, self.cost_critic_model, name="cost_critic"), *others)

    def examples(self, rollout: Rollout) -> tuple[DataSet, int] | None:
        if self.ptx is None:
            return None
        return self.ptx.data, self.ptx.examples_per_update * self.updates_per_step(rollout)

    def initial_state(self) -> dict[str, float]:
        return super().initial_state() | {"multiplier": self.constraint.multiplier}
