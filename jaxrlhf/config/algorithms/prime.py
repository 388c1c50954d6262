"""Settings of PRIME."""

from dataclasses import dataclass, field
from typing import ClassVar

from jaxrlhf.config.algorithms.critic_free import GroupCompared
from jaxrlhf.config.losses import KLInReward
from jaxrlhf.config.refusal import require
from jaxrlhf.config.roles import REWARD, RoleSpec, actor, process_reward, reference
from jaxrlhf.config.settings import Finite, NotNegative, Positive, Share
from jaxrlhf.config.training import Optimizer, Training


@dataclass(frozen=True)
class PRIME(GroupCompared):
    """Process reinforcement through implicit rewards (Cui et al. 2025, arXiv:2502.01456).

    An implicit process reward model starts as the policy. It is trained so that its log-ratio to the reference, summed
    over a response, predicts whether the response is right. The log-ratio of each token is a reward in addition to the
    outcome reward. Prompts that are too easy or too hard are replaced by further prompts, as in DAPO.

    Attributes:
      process_reward: Training of the process reward model.
      beta: Factor that turns the summed log-ratio into the log-odds that the response is right.
      process_weight: Weight of the token rewards, added to the outcome. They are scaled so that no reward-to-go exceeds
        1 in absolute value.
      gamma: Discount of the token rewards per action token.
      success: Score above which a response is right.
      least_accuracy: Smallest share of right responses to a prompt that is trained on.
      most_accuracy: Largest share of right responses to a prompt that is trained on.
      max_rounds: Largest number of times that a step samples prompts; 1 replaces no prompts.
    """

    collect: ClassVar[str] = "jaxrlhf.dataflows.prime:collect"
    learn: ClassVar[str] = "jaxrlhf.dataflows.prime:learn"
    takes_several_sequences: ClassVar[bool] = False

    process_reward: Training = field(default_factory=lambda: Training(optimizer=Optimizer(learning_rate=1e-6)))
    beta: Positive[float] = 0.05
    process_weight: NotNegative[float] = 1.0
    gamma: Share[float] = 1.0
    success: Finite[float] = 0.5
    least_accuracy: Share[float] = 0.2
    most_accuracy: Share[float] = 0.8
    max_rounds: Positive[int] = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            not isinstance(self.kl, KLInReward),
            f"PRIME requires rewards at the last token only, but kl={self.kl} penalizes every token; use KLInLoss",
        )
        require(
            self.least_accuracy <= self.most_accuracy,
            f"PRIME.least_accuracy={self.least_accuracy} is above most_accuracy={self.most_accuracy}, so no prompt "
            "would be trained on; lower least_accuracy",
        )

    def roles(self, training: Training) -> tuple[RoleSpec, ...]:
        return (actor(training), process_reward(self.process_reward), reference(), REWARD)
