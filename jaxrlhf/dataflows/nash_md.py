"""Nash-MD: a policy learns to be preferred to a geometric mixture of itself and the reference.

Source: Munos et al. 2023 (Nash learning from human feedback, arXiv:2312.00886).
"""

from dataclasses import replace

import numpy as np

from jaxrlhf import algos
from jaxrlhf.batch import Array
from jaxrlhf.config import NashMD
from jaxrlhf.dataflows import grpo
from jaxrlhf.dataflows.batches.scored import ScoredRollout
from jaxrlhf.dataflows.collect import responses
from jaxrlhf.dataflows.grpo import Returns
from jaxrlhf.dataflows.step import Metrics, Roles, StepInput, StepResult, value_of


def collect(roles: Roles, work: StepInput[NashMD]) -> ScoredRollout:
    """Sample responses, and with another seed one opponent response per problem from the mixture, as `beside`."""
    sampled = responses(roles, work)
    seed = int(np.random.SeedSequence([work.seed, 1]).generate_state(1)[0] >> 1)
    drawn = roles.actor.generate_opponents(sampled.problems, work.config.rollout.sampling, seed=seed)
    scores = roles.reward.compute_reward(sampled.problems, drawn)
    return replace(sampled, beside=ScoredRollout(sampled.problems, drawn, scores))


def learn(roles: Roles, work: StepInput[NashMD], batch: ScoredRollout) -> StepResult:
    """Learn by Nash-MD: probability of being preferred, minus 1/2, minus beta times the log-ratio to the reference."""
    settings, copies = work.settings, work.config.rollout.responses_per_prompt
    opponents = batch.beside  # None when programs are lowered
    metrics: Metrics = {}

    def advantage(returns: Returns) -> Array:
        assert returns.log_ratio_BT is not None, "the role is there"
        theirs_B, known_B = returns.score_B, np.asarray(returns.scorable_B)
        if opponents is not None:
            theirs = value_of(opponents.scores)
            theirs_B, found_B = np.repeat(theirs.score_B, copies), np.repeat(theirs.scorable_B, copies)
            known_B = known_B & found_B
        chance_B = algos.preferred(returns.score_B, theirs_B, how=settings.preference)
        metrics["nash/preferred"] = float(np.mean(chance_B, where=known_B)) if known_B.any() else float("nan")
        log_ratio_B = np.asarray(returns.log_ratio_BT).sum(axis=1)
        return np.where(known_B, algos.nash_advantage(chance_B, log_ratio_B, beta=settings.beta), 0)

    result = grpo.learn(roles, work, batch, advantage)
    if opponents is None:
        return result
    return grpo.with_beside(replace(result, metrics=result.metrics | metrics), "score/opponents", opponents)
