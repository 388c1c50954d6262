"""Algorithms without a critic that differ in their advantage: what each compares a response with.

Each is the step of `jaxrlhf.dataflows.critic_free` with a function of `jaxrlhf.algos`, where the
equations are.
"""

from dataclasses import replace

import numpy as np

from jaxrlhf import algos
from jaxrlhf.batch import Array, Scores
from jaxrlhf.config import GRPO, ReinforcePlusPlus
from jaxrlhf.dataflows.critic_free import Rewarded, step
from jaxrlhf.dataflows.step import StepInput, StepResult
from jaxrlhf.single_controller.pools import Roles


def grpo(roles: Roles, work: StepInput) -> StepResult:
    """Minus the mean of the group, over its standard deviation; without the division it is Dr. GRPO."""
    settings = work.config.algorithm
    assert isinstance(settings, GRPO)
    normalize = settings.normalize_std
    return step(roles, work, lambda of: algos.group_relative(*of.groups, normalize_std=normalize))


def rloo(roles: Roles, work: StepInput) -> StepResult:
    """Minus the mean of the rest of the group."""
    return step(roles, work, lambda of: algos.rloo(*of.groups))


def opo(roles: Roles, work: StepInput) -> StepResult:
    """Minus the mean of the group, in which long responses weigh more."""
    return step(roles, work, lambda of: algos.length_weighted(*of.groups, of.length_B))


def gpg(roles: Roles, work: StepInput) -> StepResult:
    """Minus the mean of the group, scaled up for the groups that teach nothing."""
    return step(roles, work, lambda of: algos.group_policy_gradient(*of.groups))


def reinforce_plus_plus(roles: Roles, work: StepInput) -> StepResult:
    """Returns per token, whitened over the batch; no groups."""
    settings = work.config.algorithm
    assert isinstance(settings, ReinforcePlusPlus)

    def advantage(of: Rewarded) -> Array:
        return algos.whiten(algos.discounted_returns(of.reward_BT, of.mask_BT, gamma=settings.gamma), of.mask_BT)

    return step(roles, work, advantage)


def reinforce_plus_plus_baseline(roles: Roles, work: StepInput) -> StepResult:
    """Minus the mean of the group, then whitened over the batch."""

    def advantage(of: Rewarded) -> Array:
        centred_B = algos.group_relative(*of.groups, normalize_std=False)
        return algos.whiten(algos.to_tokens(centred_B, of.mask_BT), of.mask_BT)

    return step(roles, work, advantage)


def remax(roles: Roles, work: StepInput) -> StepResult:
    """Minus what the greedy response to the same prompt earned."""
    greedy = replace(work.config.rollout.sampling, greedy=True)
    one = roles.actor.generate_sequences(work.problems, greedy, responses_per_prompt=1, seed=work.seed)
    baseline = roles.reward.compute_reward(work.problems, one)
    copies = work.config.rollout.responses_per_prompt

    def advantage(of: Rewarded) -> Array:
        scores: Scores = baseline.result()
        baseline_B, known_B = np.repeat(scores.score_B, copies), np.repeat(scores.scorable_B, copies)
        return algos.greedy_relative(of.reward_BT, baseline_B, of.mask_BT & known_B[:, None])

    result = step(roles, work, advantage)
    known_P = np.asarray(baseline.result().scorable_B)
    metrics = result.metrics | {
        "score/greedy": float(np.mean(baseline.result().score_B, where=known_P)) if known_P.any() else float("nan"),
        "tokens/generated": result.metrics["tokens/generated"] + float(one.result().sequences.mask_BT.sum()),
    }
    return replace(result, metrics=metrics)
