"""Settings of on-policy distillation."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from jaxrlhf.config.algorithms.algorithm import PolicyGradient
from jaxrlhf.config.refusal import require
from jaxrlhf.config.roles import REWARD, RoleSpec, actor, reference
from jaxrlhf.config.sources import Pretrained
from jaxrlhf.config.training import Training


@dataclass(frozen=True)
class Distillation(PolicyGradient):
    """On-policy distillation (Agarwal et al. 2024, arXiv:2306.13649): a teacher judges each token of the student.

    Rewards are measured but not optimized.

    Attributes:
      reference_model: Teacher model; it has the student's tokenizer.
    """

    learn: ClassVar[Callable[..., Any] | str] = "jaxrlhf.dataflows.distillation:learn"

    reference_model: Pretrained = field(default_factory=lambda: Pretrained("Qwen/Qwen2.5-1.5B-Instruct"))

    def roles(self, training: Training) -> tuple[RoleSpec, ...]:
        return (actor(training), reference(self.reference_model), REWARD)

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.kl is None,
            "Distillation uses the KL to the teacher as its advantage, so kl would count it twice; set "
            "algorithm.kl=None",
        )
