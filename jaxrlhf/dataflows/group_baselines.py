"""Further advantages relative to a group of responses: pass@k, MaxRL, GDPO, optimal token baseline, online DPO.

Each calls `learn` of `grpo.py` with another advantage function; the equations are in `jaxrlhf.algos`.
"""

import numpy as np

from jaxrlhf import algos
from jaxrlhf.batch import Array
from jaxrlhf.config import GRPO, OnlineDPO, PolicyGradient, Refusal
from jaxrlhf.dataflows.batches.episodes import truncated_with
from jaxrlhf.dataflows.batches.scored import ScoredRollout
from jaxrlhf.dataflows.grpo import Returns, learn
from jaxrlhf.dataflows.step import Roles, StepInput, StepResult, call, value_of
from jaxrlhf.rewards.parts import ENVIRONMENT, part_names


def grpo_passk(roles: Roles, work: StepInput[GRPO], batch: ScoredRollout) -> StepResult:
    """Learn by GRPO for pass@k: only the group's best response has an advantage, its lead over the second best."""
    normalize = work.settings.normalize_std
    return learn(roles, work, batch, lambda returns: algos.best_of_group(*returns.groups, normalize_std=normalize))


def maxrl(roles: Roles, work: StepInput[PolicyGradient], batch: ScoredRollout) -> StepResult:
    """Learn by MaxRL: the advantage is the score minus the group mean, divided by the group mean.

    Raises:
      Refusal: A score is below 0.
    """

    def advantage(returns: Returns) -> Array:
        lowest = float(np.min(returns.score_B, where=np.asarray(returns.scorable_B), initial=0.0))
        if lowest < 0:
            raise Refusal(
                f"MaxRL divides by the mean score of a group, which is a share of successes, and a response has the "
                f"score {lowest:g}; give rewards of 0 or more, or choose GRPO"
            )
        return algos.mean_relative(*returns.groups)

    return learn(roles, work, batch, advantage)


def gdpo(roles: Roles, work: StepInput[PolicyGradient], batch: ScoredRollout) -> StepResult:
    """Learn by GDPO: normalize each reward within the group, and whiten the weighted sum over the batch."""
    rewards = work.config.rewards
    weights = dict(zip(part_names(rewards.parts), (part.weight for part in rewards.parts), strict=True))
    if work.config.environment is not None:
        weights[ENVIRONMENT] = 1.0

    def advantage(returns: Returns) -> Array:
        weighed = {name: weight for name, weight in weights.items() if weight}
        part_KB = np.stack([value_of(batch.scores).parts[name] for name in weighed])
        if (environment := work.config.environment) is not None and batch.record_E is not None:
            part_KB = np.where(truncated_with(environment, list(batch.record_E), "zero"), 0, part_KB)
        return algos.decoupled(part_KB, np.array([*weighed.values()]), returns.scorable_B, returns.prompt_id_B)

    return learn(roles, work, batch, advantage)


def optimal_token_baseline(roles: Roles, work: StepInput[PolicyGradient], batch: ScoredRollout) -> StepResult:
    """Learn with the optimal token baseline: rewards to go minus the minimum-variance baseline at each token position.

    The baseline weights come from `compute_gradient_energy`, one more forward pass of the actor.
    """
    energy_BT = call(lambda _, energy_BT: energy_BT, batch.rollout, roles.actor.compute_gradient_energy(batch.rollout))

    def advantage(returns: Returns) -> Array:
        return algos.optimal_token_baseline(returns.reward_BT, energy_BT, returns.mask_BT, returns.prompt_id_B)

    return learn(roles, work, batch, advantage)


def online_dpo(roles: Roles, work: StepInput[OnlineDPO], batch: ScoredRollout) -> StepResult:
    """Learn by online DPO: the best response to each prompt is preferred to the worst."""

    def advantage(returns: Returns) -> Array:
        assert returns.log_ratio_BT is not None, "the role is there"
        log_ratio_B = np.asarray(returns.log_ratio_BT).sum(axis=1)
        return algos.best_and_worst(*returns.groups, log_ratio_B, beta=work.settings.beta)

    return learn(roles, work, batch, advantage)
