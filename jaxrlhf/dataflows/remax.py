"""ReMax: the baseline is the score of an additional greedy response.

Source: Li et al. 2024 (ReMax, arXiv:2310.10505).
"""

from dataclasses import replace

import numpy as np

from jaxrlhf import algos
from jaxrlhf.batch import Array
from jaxrlhf.config import PolicyGradient
from jaxrlhf.dataflows import grpo
from jaxrlhf.dataflows.batches.scored import ScoredRollout
from jaxrlhf.dataflows.collect import respond, responses
from jaxrlhf.dataflows.step import Roles, StepInput, StepResult, value_of


def collect(roles: Roles, work: StepInput[PolicyGradient]) -> ScoredRollout:
    """Sample responses, and decode one greedy response to each of their problems, returned as `beside`."""
    sampled, likeliest = responses(roles, work), replace(work.config.rollout.sampling, greedy=True)
    greedy = respond(roles, work, sampled.problems, sampling=likeliest, responses_per_prompt=1)
    return replace(sampled, beside=greedy)


def learn(roles: Roles, work: StepInput[PolicyGradient], batch: ScoredRollout) -> StepResult:
    """Learn by ReMax: rewards to go minus the score of the greedy response to the same prompt."""
    greedy, copies = batch.beside, work.config.rollout.responses_per_prompt
    assert greedy is not None

    def advantage(returns: grpo.Returns) -> Array:
        baseline = value_of(greedy.scores)
        baseline_B, known_B = np.repeat(baseline.score_B, copies), np.repeat(baseline.scorable_B, copies)
        return algos.greedy_relative(returns.reward_BT, baseline_B, returns.mask_BT & known_B[:, None])

    return with_beside(grpo.learn(roles, work, batch, advantage), "score/greedy", greedy)


def with_beside(result: StepResult, name: str, beside: ScoredRollout) -> StepResult:
    """Add further responses to a step's metrics: their mean score as `name`, and their tokens to `tokens/generated`."""
    scores, tokens = value_of(beside.scores), float(value_of(beside.rollout).sequences.mask_BT.sum())
    known_P = np.asarray(scores.scorable_B)
    metrics = result.metrics | {
        name: float(np.mean(scores.score_B, where=known_P)) if known_P.any() else float("nan"),
        "tokens/generated": result.metrics["tokens/generated"] + tokens,
    }
    return replace(result, metrics=metrics)
