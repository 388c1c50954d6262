"""MaxRL: maximum likelihood of success, on generated arithmetic word problems.

    python -m jaxrlhf.train --config maxrl.py

GRPO with another division: the score minus the group's mean, divided by the mean. The rarer success is, the more it
counts. All other settings are those of `grpo_arithmetic.py`.

Result: 3.1 % of held-out answers are right after the cold start, 97.3 % at the end.

Source: Tajwar et al. 2026 (Maximum likelihood reinforcement learning, arXiv:2602.02710).
"""

from dataclasses import dataclass, replace

import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int

from jaxrlhf import algos
from jaxrlhf.algos.groups import dense_ids, group_sum
from jaxrlhf.batch import Array
from jaxrlhf.config import Config, GroupCompared, KLInReward, Refusal, load
from jaxrlhf.config.refusal import require
from jaxrlhf.dataflows import grpo
from jaxrlhf.dataflows.batches.scored import ScoredRollout
from jaxrlhf.dataflows.step import Roles, StepInput, StepResult


def mean_relative(
    score_B: Float[Array, "B"], scorable_B: Bool[Array, "B"], group_B: Int[Array, "B"]
) -> Float[Array, "B"]:
    """Compute the score minus the group's mean, divided by the mean.

        A_i = (s_i - mean_g) / (mean_g + 1e-6)

    With scores of 0 and 1 the gradient is that of the log-likelihood of success, to the order that the group size
    allows.

    Args:
      score_B: Scores, 0 or more.

    Source: Tajwar et al. 2026 (arXiv:2602.02710), the estimator over successes with the mean as a control variate.
    """
    centred_B = algos.group_relative(score_B, scorable_B, group_B, normalize_std=False)
    group_B = dense_ids(group_B)
    count_B = group_sum(jnp.asarray(scorable_B, int), group_B)
    mean_B = group_sum(algos.selected(score_B, scorable_B), group_B) / jnp.maximum(count_B, 1)
    return centred_B / (mean_B + 1e-6)


def learn(roles: Roles, work: StepInput["MaxRL"], batch: ScoredRollout) -> StepResult:
    """Learn by MaxRL.

    Raises:
      Refusal: A score is below 0.
    """

    def advantage(returns: grpo.Returns) -> Array:
        lowest = float(np.min(returns.score_B, where=np.asarray(returns.scorable_B), initial=0.0))
        if lowest < 0:
            raise Refusal(
                "MaxRL divides by the mean score of a group, so scores must be 0 or more, but a response has the "
                f"score {lowest:g}; use rewards of 0 or more, or choose GRPO"
            )
        return mean_relative(*returns.groups)

    return grpo.learn(roles, work, batch, advantage)


@dataclass(frozen=True)
class MaxRL(GroupCompared):
    """Maximum likelihood of success; scores must be 0 or more."""

    learn = learn

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            not isinstance(self.kl, KLInReward),
            f"MaxRL divides by the mean score of a group, but kl={self.kl} penalizes every token, so scores could be "
            "below 0; use KLInLoss",
        )


def get_config() -> Config:
    """Return the configuration of the run."""
    base = load("grpo_arithmetic")
    return replace(base, name="maxrl", algorithm=MaxRL(responses_per_update=64))
