"""DAPO: GRPO with dynamic sampling, an overlong penalty and overlong filtering.

Source: Yu et al. 2025 (arXiv:2503.14476).
"""

from dataclasses import replace

import numpy as np

from jaxrlhf.algos import group_relative, has_spread, overlong_penalty
from jaxrlhf.batch import Array, Scores
from jaxrlhf.config import DAPO
from jaxrlhf.dataflows import grpo
from jaxrlhf.dataflows.batches.episode_rows import sampled_lengths
from jaxrlhf.dataflows.batches.scored import ScoredRollout
from jaxrlhf.dataflows.collect import dynamic_sampling
from jaxrlhf.dataflows.grpo import Returns
from jaxrlhf.dataflows.step import Roles, StepInput, StepResult


def collect(roles: Roles, work: StepInput[DAPO]) -> ScoredRollout:
    """Sample until enough groups have differing scores; penalize length, and do not train on truncated responses."""
    wanted, settings = "with differing scores", work.settings
    sampled = dynamic_sampling(roles, work, has_reward_variance, max_rounds=settings.max_rounds, wanted=wanted)
    batch = sampled.for_step(work.config.rollout.prompts_per_step)
    length_B, truncated_B = sampled_lengths(batch.rollout)
    trained_B = batch.trained_B & ~truncated_B if settings.mask_truncated else batch.trained_B
    return replace(batch, scores=shaped(work, batch, length_B), trained_B=trained_B)


def learn(roles: Roles, work: StepInput[DAPO], batch: ScoredRollout) -> StepResult:
    """Update the actor as GRPO does."""
    return grpo.learn(roles, work, batch, advantage)


def has_reward_variance(scores: Scores, prompt_id_B: Array) -> Array:
    """Return True for responses whose group has differing scores, `[B]`."""
    return has_spread(scores.score_B, scores.scorable_B, prompt_id_B)


def advantage(returns: Returns) -> Array:
    """Return GRPO's advantage, `[B]`."""
    return group_relative(*returns.groups, normalize_std=True)


def shaped(work: StepInput[DAPO], batch: ScoredRollout, length_B: np.ndarray) -> Scores:
    """Add the overlong penalty of these lengths to the scores, also as the part "overlong"."""
    punishment, limit = work.settings.overlong, work.config.rollout.max_response_tokens
    if punishment is None:
        return batch.scores
    buffer = max(1, round(punishment.buffer_share * limit))
    penalty_B = overlong_penalty(length_B, max_tokens=limit, buffer_tokens=buffer, factor=punishment.factor)
    penalty_B = np.where(batch.scores.scorable_B, penalty_B, 0).astype(np.float32)
    parts = batch.scores.parts | {"overlong": penalty_B}
    return replace(batch.scores, score_B=batch.scores.score_B + penalty_B, parts=parts)
