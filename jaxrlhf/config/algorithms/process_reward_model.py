"""Settings of process reward models, trained on labeled steps."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from jaxrlhf.config.algorithms.algorithm import Algorithm
from jaxrlhf.config.algorithms.preference import check_critic_alone, check_labelled
from jaxrlhf.config.roles import RoleSpec, critic
from jaxrlhf.config.settings import Positive
from jaxrlhf.config.sources import HubSteps, StepFile
from jaxrlhf.config.training import Optimizer, Training

if TYPE_CHECKING:
    from jaxrlhf.config.run import Config


@dataclass(frozen=True)
class ProcessRewardModel(Algorithm):
    """Process reward model: probability that a step of a solution is right (Lightman et al. 2023, arXiv:2305.20050).

    The model is a critic without an actor; its value after a step's last token is the log-odds. The export is a
    sequence-classification checkpoint for `ProcessModelReward`. The last step is read at the position after the
    solution, so a solution has at most `rollout.max_response_tokens` - 1 tokens.

    Attributes:
      solutions_per_update: Number of solutions in one optimizer update.
      critic: Training of the process reward model; its trunk starts as the configuration's model.
    """

    learn: ClassVar[str] = "jaxrlhf.dataflows.reward_model:learn_steps"
    evaluation: ClassVar[str | None] = "jaxrlhf.dataflows.reward_model:evaluate_steps"
    places_after: ClassVar[int | None] = 1

    solutions_per_update: Positive[int] = 32
    critic: Training = field(default_factory=lambda: Training(optimizer=Optimizer(learning_rate=1e-5)))

    def roles(self, config: Config) -> tuple[RoleSpec, ...]:
        return (critic(self.critic),)

    def problems_per_step(self, config: Config) -> int:
        return self.solutions_per_update

    def updates_per_step(self, config: Config) -> int:
        return 1

    def check(self, config: Config) -> None:
        check_labelled(self, config, (StepFile, HubSteps), "labelled steps", give="StepFile or HubSteps")
        check_critic_alone(self, config)
