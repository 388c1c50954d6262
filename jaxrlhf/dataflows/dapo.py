"""DAPO: GRPO with dynamic sampling, an overlong punishment and overlong filtering.

Source: Yu et al. 2025 (arXiv:2503.14476).
"""

from dataclasses import replace

import numpy as np

from jaxrlhf.algos import group_relative, has_spread, overlong_penalty
from jaxrlhf.batch import Array, Scores
from jaxrlhf.config import DAPO
from jaxrlhf.dataflows.dynamic_sampling import PromptGroups, dynamic_sampling
from jaxrlhf.dataflows.grpo import Returns, learn
from jaxrlhf.dataflows.step import Roles, StepInput, StepResult


def step(roles: Roles, work: StepInput[DAPO]) -> StepResult:
    """One DAPO iteration: sample until enough groups have differing scores, punish length, filter, learn."""
    wanted = "that score differently"
    sampled = dynamic_sampling(roles, work, has_reward_variance, max_rounds=work.settings.max_rounds, wanted=wanted)
    batch = sampled.batch(work.config.rollout.prompts_per_step)
    trained_B = batch.informative_B
    if work.settings.mask_truncated:
        trained_B = trained_B & ~np.asarray(batch.rollout.truncated_B)
    result = learn(roles, work, batch.rollout, shaped(work, batch), advantage, trained_B=trained_B)
    metrics = result.metrics | sampled.metrics() | {"group/kept": float(batch.informative_P.sum())}
    return replace(result, metrics=metrics, problems=batch.problems)


def has_reward_variance(scores: Scores, prompt_id_B: Array) -> Array:
    """True for responses whose group's scores differ, `[B]`."""
    return has_spread(scores.score_B, scores.scorable_B, prompt_id_B)


def advantage(returns: Returns) -> Array:
    """GRPO's advantage, `[B]`."""
    return group_relative(*returns.groups, normalize_std=True)


def shaped(work: StepInput[DAPO], batch: PromptGroups) -> Scores:
    """Scores with the overlong punishment added, as a part of its own."""
    punishment, limit = work.settings.overlong, work.config.rollout.max_response_tokens
    if punishment is None:
        return batch.scores
    length_B = np.asarray(batch.rollout.sequences.mask_BT).sum(axis=1)
    buffer = max(1, round(punishment.buffer_share * limit))
    penalty_B = overlong_penalty(length_B, max_tokens=limit, buffer_tokens=buffer, factor=punishment.factor)
    penalty_B = np.where(batch.scores.scorable_B, penalty_B, 0).astype(np.float32)
    parts = batch.scores.parts | {"overlong": penalty_B}
    return replace(batch.scores, score_B=batch.scores.score_B + penalty_B, parts=parts)
