"""Settings of algorithms that learn from preference pairs."""

from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from jaxrlhf.config.algorithms.algorithm import Algorithm
from jaxrlhf.config.roles import RoleSpec, actor, critic, reference
from jaxrlhf.config.settings import Bound, NotNegative, Positive, within
from jaxrlhf.config.training import Optimizer, Rollout, Training


@dataclass(frozen=True)
class Preference(Algorithm):
    """Base class of algorithms that learn from preference pairs: one update per step, evaluation on held-out pairs.

    Class attributes:
      reads: Setting of the data that names fields which the loss reads in addition to the two answers; None is no such
        fields.

    Attributes:
      pairs_per_update: Number of pairs in one optimizer update.
    """

    learn: ClassVar[str] = "jaxrlhf.dataflows.dpo:learn"
    evaluation: ClassVar[str | None] = "jaxrlhf.dataflows.dpo:evaluate"
    positions_after: ClassVar[int | None] = 0
    together: ClassVar[int] = 2
    reads: ClassVar[str | None] = None

    pairs_per_update: Positive[int] = 32

    def problems_per_step(self, rollout: Rollout) -> int:
        return self.pairs_per_update

    def updates_per_step(self, rollout: Rollout) -> int:
        return 1


@dataclass(frozen=True)
class DPO(Preference):
    """Direct preference optimization (Rafailov et al. 2023, arXiv:2305.18290).

    Attributes:
      beta: Strength of the KL penalty to the reference.
      label_smoothing: Share of pairs whose labels are assumed to be swapped.
    """

    beta: Positive[float] = 0.1
    label_smoothing: Annotated[float, within(0.0, 0.5)] = 0.0

    def roles(self, training: Training) -> tuple[RoleSpec, ...]:
        return (actor(training), reference())


@dataclass(frozen=True)
class RPO(DPO):
    """DPO plus the likelihood of the chosen answer (Pang et al. 2024, arXiv:2404.19733).

    Attributes:
      nll_coefficient: Weight of the chosen answer's negative log-likelihood per token.
    """

    nll_coefficient: Positive[float] = 1.0


@dataclass(frozen=True)
class IPO(Preference):
    """Identity preference optimization (Azar et al. 2023, arXiv:2310.12036).

    Attributes:
      beta: Regularization strength; the target of the difference of log-ratios is 1 / (2 beta).
    """

    beta: Positive[float] = 0.1

    def roles(self, training: Training) -> tuple[RoleSpec, ...]:
        return (actor(training), reference())


@dataclass(frozen=True)
class KTO(Preference):
    """Kahneman-Tversky optimization: each answer is good or bad by itself (Ethayarajh et al. 2024, arXiv:2402.01306).

    The two answers of a pair are two examples, one good and one bad. Answers placed after the prompt of another pair
    estimate the policy's distance to the reference.

    Attributes:
      beta: Strength of the KL penalty to the reference.
      desirable_weight: Weight of chosen answers.
      undesirable_weight: Weight of rejected answers.
    """

    further_passes: ClassVar[tuple[str, ...]] = ("actor", "reference")

    pairs_per_update: Annotated[int, Bound(lambda value: value > 1, "2 or more (it needs prompts of other pairs)")] = 32
    beta: Positive[float] = 0.1
    desirable_weight: NotNegative[float] = 1.0
    undesirable_weight: NotNegative[float] = 1.0

    def roles(self, training: Training) -> tuple[RoleSpec, ...]:
        return (actor(training), reference())


@dataclass(frozen=True)
class ReferenceFree(Preference):
    """Base class of preference algorithms without a reference model."""

    def roles(self, training: Training) -> tuple[RoleSpec, ...]:
        return (actor(training),)


@dataclass(frozen=True)
class SimPO(ReferenceFree):
    """Simple preference optimization: rewards are mean log-probabilities (Meng et al. 2024, arXiv:2405.14734).

    Attributes:
      beta: Reward units per nat of the mean.
      margin: Target margin (gamma in the paper) by which the chosen answer's reward should be higher.
    """

    beta: Positive[float] = 2.0
    margin: NotNegative[float] = 1.0


@dataclass(frozen=True)
class CPO(ReferenceFree):
    """Contrastive preference optimization (Xu et al. 2024, arXiv:2401.08417).

    Attributes:
      beta: Reward units per nat.
      label_smoothing: Share of pairs whose labels are assumed to be swapped.
      nll_coefficient: Weight of the chosen answers' negative log-likelihood per token.
    """

    beta: Positive[float] = 0.1
    label_smoothing: Annotated[float, within(0.0, 0.5)] = 0.0
    nll_coefficient: NotNegative[float] = 1.0


@dataclass(frozen=True)
class ORPO(ReferenceFree):
    """Odds-ratio preference optimization: likelihood plus an odds ratio (Hong et al. 2024, arXiv:2403.07691).

    Attributes:
      odds_coefficient: Weight of the odds-ratio loss (lambda in the paper), added to the likelihood loss.
    """

    odds_coefficient: Positive[float] = 0.1


@dataclass(frozen=True)
class RewardModel(Preference):
    """Reward model: its scores rank the two answers (Ouyang et al. 2022, arXiv:2203.02155, section 3.5).

    The model is a critic without an actor; its value of a whole sequence is the score. The export is a
    sequence-classification checkpoint for `ModelReward`. The score is read at the position after an answer, so an
    answer has at most `rollout.max_response_tokens` - 1 tokens.

    Attributes:
      critic: Training of the reward model; its trunk starts as the configuration's model.
    """

    learn: ClassVar[str] = "jaxrlhf.dataflows.reward_model:learn"
    evaluation: ClassVar[str | None] = "jaxrlhf.dataflows.reward_model:evaluate"
    positions_after: ClassVar[int | None] = 1
    reads: ClassVar[str | None] = "margin_key"

    critic: Training = field(default_factory=lambda: Training(optimizer=Optimizer(learning_rate=1e-5)))

    def roles(self, training: Training) -> tuple[RoleSpec, ...]:
        return (critic(self.critic),)


@dataclass(frozen=True)
class CostModel(RewardModel):
    """Cost model: above 0 for harmful answers, below 0 for others (Dai et al. 2023, arXiv:2310.12773)."""

    reads: ClassVar[str | None] = "safe_keys"
