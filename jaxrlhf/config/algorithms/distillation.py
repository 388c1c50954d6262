"""On-policy distillation."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from jaxrlhf.config.algorithms.algorithm import PolicyGradient
from jaxrlhf.config.refusal import require
from jaxrlhf.config.roles import REWARD, RoleSpec, actor, reference, teacher
from jaxrlhf.config.settings import Positive
from jaxrlhf.config.sources import Pretrained

if TYPE_CHECKING:
    from jaxrlhf.config.run import Config


@dataclass(frozen=True)
class Distillation(PolicyGradient):
    """On-policy distillation (Agarwal et al. 2024, arXiv:2306.13649): a teacher judges each token of the student.

    Rewards are measured and not followed.

    Attributes:
      reference_model: Teacher, of the student's tokenizer.
    """

    learn: ClassVar[str] = "jaxrlhf.dataflows.distillation:learn"

    reference_model: Pretrained = field(default_factory=lambda: Pretrained("Qwen/Qwen2.5-1.5B-Instruct"))

    def roles(self, config: Config) -> tuple[RoleSpec, ...]:
        return (actor(config.actor), reference(self.reference_model), REWARD)

    def check(self, config: Config) -> None:
        super().check(config)
        require(
            self.kl is None,
            "Distillation has the KL to the teacher as its advantage, and kl would count it twice; drop algorithm.kl",
        )


@dataclass(frozen=True)
class SpanDistillation(Distillation):
    """On-policy distillation from a teacher with another tokenizer.

    A response's text is tokenised anew for the teacher, in its chat template. The two are compared on spans, the
    shortest stretches of text that both tokenizers cut alike; each token of the student has the advantage of its span.

    Attributes:
      reference_model: Teacher, of any tokenizer.
      room: Tokens of the teacher for one of the student's, at most, in prompts and in responses; spans of a response
        past that train nothing, and longer prompts are refused.

    Source: spans as in Minixhofer et al. 2025 (arXiv:2503.20083), approximate likelihood matching.
    """

    learn: ClassVar[str] = "jaxrlhf.dataflows.distillation:learn_spans"
    takes_several_sequences: ClassVar[bool] = False

    room: Positive[float] = 1.5

    def roles(self, config: Config) -> tuple[RoleSpec, ...]:
        return (actor(config.actor), teacher(self.reference_model, room=self.room), REWARD)

    def check(self, config: Config) -> None:
        super().check(config)
        require(
            config.environment is None,
            "SpanDistillation tokenises a response anew, and environment has episodes of several; drop it, or choose "
            "Distillation with a teacher of the student's tokenizer",
        )
        require(
            not getattr(config.model, "vision", False),
            "SpanDistillation tokenises texts for the teacher, and model.vision has it see; choose a model that reads "
            "text",
        )
