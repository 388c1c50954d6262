"""Settings of on-policy distillation."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, ClassVar

from jaxrlhf.config.algorithms.algorithm import PolicyGradient
from jaxrlhf.config.losses import PolicyLoss
from jaxrlhf.config.refusal import require
from jaxrlhf.config.roles import REWARD, RoleSpec, actor, reference, teacher
from jaxrlhf.config.settings import Positive, Share, within
from jaxrlhf.config.sources import Pretrained

if TYPE_CHECKING:
    from jaxrlhf.config.run import Config

MOST_NAMED = 64
"""Largest number of a teacher's tokens that are compared at one position."""


@dataclass(frozen=True)
class Distillation(PolicyGradient):
    """On-policy distillation (Agarwal et al. 2024, arXiv:2306.13649): a teacher judges each token of the student.

    Rewards are measured but not optimized.

    Attributes:
      reference_model: Teacher model; it has the student's tokenizer.
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

    The text of a response is tokenized again for the teacher, in the teacher's chat template. Teacher and student are
    compared on spans: the shortest stretches of text at whose ends both tokenizations have a token boundary. Each token
    of the student gets the advantage of its span.

    Attributes:
      reference_model: Teacher model, with any tokenizer.
      room: Largest number of teacher tokens per student token, in prompts and in responses. Longer prompts are refused;
        spans of a response beyond the limit are not trained on.

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


@dataclass(frozen=True)
class LogitDistillation(SpanDistillation):
    """On-policy distillation of distributions, from a teacher with another tokenizer or the student's.

    If a span is one token in both tokenizations, the two models are compared on the teacher's most likely tokens that
    the student also has, by their text; a longer span is compared on its text. All other tokens count as one more
    event. The loss is the divergence itself, so a step also learns about tokens that were not sampled.

    Attributes:
      named: Number of most likely tokens of the teacher that are compared; 0 compares only the sampled text.
      beta: Weight of the teacher in the mixture of the divergence: 0 is KL(teacher || student), which covers all modes
        of the teacher; 1 is KL(student || teacher), which concentrates on the most likely ones.

    Source: GOLD (Patiño et al. 2025, huggingface.co/spaces/HuggingFaceH4/on-policy-distillation), spans and merged
    probabilities; Agarwal et al. 2024 (arXiv:2306.13649), the divergence; Minixhofer et al. 2025 (arXiv:2503.20083),
    the text of a span against all other texts.
    """

    learn: ClassVar[str] = "jaxrlhf.dataflows.distillation:learn_distributions"

    named: Annotated[int, within(0, MOST_NAMED)] = 32
    beta: Share[float] = 0.5

    def check(self, config: Config) -> None:
        super().check(config)
        read = PolicyLoss(aggregation=self.policy.aggregation, entropy_coefficient=self.policy.entropy_coefficient)
        require(
            self.policy == read,
            f"LogitDistillation follows a divergence, and of policy={self.policy} reads aggregation and "
            "entropy_coefficient alone; give PolicyLoss with only those",
        )
        require(
            config.rollout.sampling.most_kept == 0,
            "LogitDistillation compares whole distributions, and with rollout.sampling.top_k the student's is of a few "
            "tokens; sample with temperature only",
        )
