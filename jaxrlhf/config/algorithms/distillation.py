"""On-policy distillation."""

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
"""Tokens of a teacher that are compared in one place, at most."""


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


@dataclass(frozen=True)
class LogitDistillation(SpanDistillation):
    """On-policy distillation by distributions, from a teacher with another tokenizer or with the student's.

    Where a span is one token of each, the two are compared on the teacher's likeliest tokens, as far as the student has
    tokens of the same text; a longer span is compared on its text. What neither names is one more event. The loss is
    the divergence itself, so that a step teaches of tokens that were not sampled.

    Attributes:
      named: Likeliest tokens of the teacher that are compared; 0 compares what was sampled alone.
      beta: Weight of the teacher in the mixture of the divergence: 0 is KL(teacher || student), which covers all that
        the teacher says, 1 is KL(student || teacher), which keeps to its likeliest.

    Source: GOLD (Patiño et al. 2025, huggingface.co/spaces/HuggingFaceH4/on-policy-distillation), spans and merged
    probabilities; Agarwal et al. 2024 (arXiv:2306.13649), the divergence; Minixhofer et al. 2025 (arXiv:2503.20083),
    a span's text against all others.
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
