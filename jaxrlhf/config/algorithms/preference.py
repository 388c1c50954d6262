"""Settings of algorithms that learn from preference pairs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, ClassVar

from jaxrlhf.config.algorithms.algorithm import Algorithm
from jaxrlhf.config.refusal import require
from jaxrlhf.config.rewards import Rewards
from jaxrlhf.config.roles import RoleSpec, actor, critic, reference
from jaxrlhf.config.settings import NotNegative, Positive, within
from jaxrlhf.config.sources import ArithmeticPairs, PairFields
from jaxrlhf.config.training import Optimizer, Training

if TYPE_CHECKING:
    from jaxrlhf.config.run import Config


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
    places_after: ClassVar[int | None] = 0
    together: ClassVar[int] = 2
    reads: ClassVar[str | None] = None

    pairs_per_update: Positive[int] = 32

    def problems_per_step(self, config: Config) -> int:
        return self.pairs_per_update

    def updates_per_step(self, config: Config) -> int:
        return 1

    def check(self, config: Config) -> None:
        name = type(self).__name__
        kinds = (PairFields, ArithmeticPairs)
        check_labelled(self, config, kinds, "preference pairs", give="PairFile, HubPairs or ArithmeticPairs")
        fields = ("margin_key", "safe_keys")
        unread = [key for key in fields if key != self.reads and getattr(config.data, key, None) is not None]
        require(not unread, f"{name} does not read data.{' and data.'.join(unread)}; use None instead")


@dataclass(frozen=True)
class DPO(Preference):
    """Direct preference optimization (Rafailov et al. 2023, arXiv:2305.18290).

    Attributes:
      beta: Strength of the KL penalty to the reference.
      label_smoothing: Share of pairs whose labels are assumed to be swapped.
    """

    beta: Positive[float] = 0.1
    label_smoothing: Annotated[float, within(0.0, 0.5)] = 0.0

    def roles(self, config: Config) -> tuple[RoleSpec, ...]:
        return (actor(config.actor), reference())


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

    def roles(self, config: Config) -> tuple[RoleSpec, ...]:
        return (actor(config.actor), reference())


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

    beta: Positive[float] = 0.1
    desirable_weight: NotNegative[float] = 1.0
    undesirable_weight: NotNegative[float] = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.pairs_per_update > 1,
            "KTO estimates the distance to the reference by answers after prompts of other pairs, but "
            "pairs_per_update=1; set pairs_per_update to 2 or more",
        )

    def roles(self, config: Config) -> tuple[RoleSpec, ...]:
        return (actor(config.actor), reference())


@dataclass(frozen=True)
class ReferenceFree(Preference):
    """Base class of preference algorithms without a reference model."""

    def roles(self, config: Config) -> tuple[RoleSpec, ...]:
        return (actor(config.actor),)


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
    places_after: ClassVar[int | None] = 1
    reads: ClassVar[str | None] = "margin_key"

    critic: Training = field(default_factory=lambda: Training(optimizer=Optimizer(learning_rate=1e-5)))

    def roles(self, config: Config) -> tuple[RoleSpec, ...]:
        return (critic(self.critic),)

    def check(self, config: Config) -> None:
        super().check(config)
        check_critic_alone(self, config)


def check_labelled(algorithm: Algorithm, config: Config, kinds: tuple[type, ...], what: str, *, give: str) -> None:
    """Refuse data that is not of the kind that an algorithm for labeled answers needs, and refuse rewards."""
    name = type(algorithm).__name__
    require(
        isinstance(config.data, kinds),
        f"{name} learns from {what}, but data is {type(config.data).__name__}; give {give}",
    )
    require(config.rewards == Rewards(), f"{name} does not use rewards, but rewards are set; remove rewards")


def check_critic_alone(algorithm: Algorithm, config: Config) -> None:
    """Refuse policy settings for an algorithm that only trains a critic, read after the last token of an answer."""
    name = type(algorithm).__name__
    require(config.actor == Training(), f"{name} has no actor, but actor is set; set algorithm.critic instead")
    require(
        config.cold_start is None,
        f"cold_start trains a policy, but {name} has no policy; set cold_start=None, and model.path to a policy",
    )
    require(
        config.rollout.max_response_tokens > 1,
        f"rollout.max_response_tokens=1 leaves no token for an answer of {name}; set it to 2 or more",
    )


@dataclass(frozen=True)
class CostModel(RewardModel):
    """Cost model: above 0 for harmful answers, below 0 for others (Dai et al. 2023, arXiv:2310.12773)."""

    reads: ClassVar[str | None] = "safe_keys"

    def check(self, config: Config) -> None:
        super().check(config)
        require(
            not isinstance(config.data, PairFields) or config.data.safe_keys is not None,
            "CostModel reads labels of harmless answers, but data.safe_keys is None; set safe_keys to two fields",
        )
