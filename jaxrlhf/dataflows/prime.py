"""PRIME: outcome rewards plus token rewards of an implicit process reward model, trained online on outcomes.

Source: Cui et al. 2025 (arXiv:2502.01456), algorithm 1.
"""

from dataclasses import replace
from functools import partial

import numpy as np

from jaxrlhf import algos
from jaxrlhf.batch import Array, Scores
from jaxrlhf.config import PRIME
from jaxrlhf.dataflows import grpo
from jaxrlhf.dataflows.batches.estimate import old_log_prob, ref_log_prob, scorable
from jaxrlhf.dataflows.batches.minibatches import Minibatches, minibatches
from jaxrlhf.dataflows.batches.scored import ScoredRollout
from jaxrlhf.dataflows.collect import dynamic_sampling
from jaxrlhf.dataflows.grpo import Returns
from jaxrlhf.dataflows.step import Roles, StepInput, StepResult, call, value_of


def collect(roles: Roles, work: StepInput[PRIME]) -> ScoredRollout:
    """Sample until enough prompts have a share of right responses within the settings' range."""
    settings = work.settings
    share = f"with a share of {settings.least_accuracy} to {settings.most_accuracy} correct"
    in_range = partial(in_band, settings)
    sampled = dynamic_sampling(roles, work, in_range, max_rounds=settings.max_rounds, wanted=share)
    return sampled.for_step(work.config.rollout.prompts_per_step)


def learn(roles: Roles, work: StepInput[PRIME], batch: ScoredRollout) -> StepResult:
    """Reward tokens by the process reward model, then update the process reward model and the actor."""
    old_logp = old_log_prob(roles, work, batch.rollout)
    ref_logp = ref_log_prob(roles, work, batch.rollout)
    logp = roles.process_reward.compute_log_prob(batch.rollout)
    prepared = call(partial(prepare, work, batch), old_logp, ref_logp, logp)
    process = roles.process_reward.update_process_reward(
        prepared.further, objective=algos.outcome_objective, settings=work.settings
    )
    actor = roles.actor.update_actor(prepared.policy, objective=algos.policy_objective, settings=work.settings)
    metrics = prepared.metrics | batch.metrics
    return StepResult(metrics, prepared.state, value_of(old_logp), updates=(process, actor))


def in_band(settings: PRIME, scores: Scores, prompt_id_B: Array) -> Array:
    """Return True for responses to prompts whose share of right responses is in the range to train on, `[B]`."""
    right_B, scorable_B = np.asarray(scores.score_B) > settings.success, np.asarray(scores.scorable_B)
    _, group_B = np.unique(prompt_id_B, return_inverse=True)
    right_P, count_P = (np.bincount(group_B, weights=counted_B) for counted_B in (right_B & scorable_B, scorable_B))
    share_B = (right_P / np.maximum(count_P, 1))[group_B]
    return (settings.least_accuracy <= share_B) & (share_B <= settings.most_accuracy) & (count_P > 1)[group_B]


def prepare(
    work: StepInput[PRIME], batch: ScoredRollout, old_logp_BT: Array | None, ref_logp_BT: Array, logp_BT: Array
) -> Minibatches:
    """Build the actor's minibatches, from outcomes and token rewards, and the process reward model's as `further`."""
    settings, rollout, scores, trained_B = work.settings, batch.rollout, batch.scores, batch.trained_B
    assert trained_B is not None
    sequences = scorable(rollout.sequences, scores)
    mask_BT = np.asarray(sequences.mask_BT) & trained_B[:, None]
    ratio_BT = np.where(mask_BT, np.subtract(logp_BT, ref_logp_BT), 0)
    advantage = partial(process_advantage, settings, ratio_BT, mask_BT)
    prepared = grpo.prepare(work, advantage, trained_B, rollout, scores, old_logp_BT, ref_logp_BT)
    right_B = np.asarray(scores.score_B) > settings.success
    outcomes = minibatches(
        work,
        replace(sequences, mask_BT=mask_BT),
        {"ref_logp": ref_logp_BT, "outcome": mask_BT & right_B[:, None]},
        aggregation="seq-mean-token-mean",
    )
    kept_B = mask_BT.any(axis=1)
    metrics = prepared.metrics | {
        "process/log_ratio": float(np.abs(ratio_BT.sum(axis=1))[kept_B].mean()),
        "process/accuracy": pair_accuracy(
            ratio_BT.sum(axis=1)[kept_B], right_B[kept_B], np.asarray(sequences.prompt_id_B)[kept_B]
        ),
    }
    return Minibatches(prepared.policy, [], metrics, prepared.state, outcomes)


def process_advantage(settings: PRIME, ratio_BT: Array, mask_BT: Array, returns: Returns) -> Array:
    """Compute leave-one-out returns of outcomes and of token rewards, and whiten their sum."""
    process_BT = settings.process_weight * algos.normalized_rewards(ratio_BT, mask_BT)
    outcome_BT = algos.token_rewards(returns.score_B, None, returns.mask_BT, kl_coefficient=0.0)
    return_BT = algos.process_returns(outcome_BT, process_BT, mask_BT, returns.prompt_id_B, gamma=settings.gamma)
    return algos.whiten(return_BT, mask_BT)


def pair_accuracy(ratio_B: np.ndarray, right_B: np.ndarray, prompt_id_B: np.ndarray) -> float:
    """Return how often a right response has a higher log-ratio than a wrong response to the same prompt.

    A pair of equal log-ratios counts as half. The result is NaN if no prompt has both kinds of response.
    """
    compared_BB = (prompt_id_B[:, None] == prompt_id_B) & right_B[:, None] & ~right_B
    ahead = np.sign(ratio_B[:, None] - ratio_B)[compared_BB]
    return float(np.mean((ahead + 1) / 2)) if len(ahead) else float("nan")
