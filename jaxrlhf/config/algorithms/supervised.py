"""Settings of supervised fine-tuning."""

from dataclasses import dataclass, field
from typing import ClassVar

from jaxrlhf.config.algorithms.algorithm import Algorithm
from jaxrlhf.config.mixtures import Data
from jaxrlhf.config.roles import RoleSpec, actor
from jaxrlhf.config.settings import Positive, Settings
from jaxrlhf.config.training import Optimizer, Rollout, Training


@dataclass(frozen=True)
class SFT(Algorithm):
    """Supervised fine-tuning on worked solutions, with the token-mean negative log-likelihood.

    Held-out solutions give a loss. Answers to held-out problems are also scored, unless `rewards.parts` is empty.

    Attributes:
      examples_per_update: Number of solutions in one optimizer update.
    """

    learn: ClassVar[str] = "jaxrlhf.dataflows.sft:learn"
    evaluation: ClassVar[str | None] = "jaxrlhf.dataflows.sft:evaluate"
    reads_solutions: ClassVar[bool] = True

    examples_per_update: Positive[int] = 64

    def roles(self, training: Training) -> tuple[RoleSpec, ...]:
        return (actor(training),)

    def problems_per_step(self, rollout: Rollout) -> int:
        return self.examples_per_update

    def updates_per_step(self, rollout: Rollout) -> int:
        return 1


@dataclass(frozen=True)
class ColdStart(Settings):
    """Short supervised stage before the main stage, for policies without any skill in the task.

    It trains all of the actor's weights with a separate optimizer; LoRA adapters are added only after it.

    Attributes:
      data: Records with worked solutions; None uses the data of the run.
      max_prompt_tokens: Longest prompt of this stage in tokens, which also shortens its rows; longer prompts are
        dropped and counted. None is the limit of the run.
    """

    steps: Positive[int]
    algorithm: SFT = field(default_factory=SFT)
    optimizer: Optimizer = field(default_factory=lambda: Optimizer(learning_rate=1e-3))
    data: Data | None = None
    max_prompt_tokens: Positive[int] | None = None
