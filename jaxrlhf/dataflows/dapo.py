"""DAPO: GRPO on groups that have something to compare, without a word on responses that were cut off.

Source: Yu et al. 2025 (arXiv:2503.14476).
"""

from dataclasses import replace

import numpy as np

from jaxrlhf.algos import group_relative, has_spread, overlong_penalty
from jaxrlhf.batch import Array, Scores
from jaxrlhf.config import DAPO, Config
from jaxrlhf.dataflows.critic_free import Rewarded, learn
from jaxrlhf.dataflows.dynamic_sampling import Answered, sampled
from jaxrlhf.dataflows.step import StepInput, StepResult
from jaxrlhf.single_controller.pools import Roles


def step(roles: Roles, work: StepInput) -> StepResult:
    """One DAPO iteration: sample until enough groups have spread, shape, filter, learn."""
    settings = work.config.algorithm
    assert isinstance(settings, DAPO)
    found = sampled(roles, work, spread, max_rounds=settings.max_rounds, otherwise="that score differently")
    batch = found.batch(work.config.rollout.prompts_per_step)
    trained_B = batch.teaches_B
    if settings.mask_truncated:
        trained_B = trained_B & ~np.asarray(batch.rollout.truncated_B)
    scores = shaped(work.config, batch)
    result = learn(roles, work, batch.rollout, scores, advantage, trained_B=trained_B)
    metrics = result.metrics | found.metrics() | {"group/kept": float(batch.teaches_P.sum())}
    return replace(result, metrics=metrics, problems=batch.problems)


def spread(scores: Scores, prompt_id_B: Array) -> Array:
    """Whether a group's scores differ."""
    return has_spread(scores.score_B, scores.scorable_B, prompt_id_B)


def advantage(of: Rewarded) -> Array:
    """GRPO's."""
    return group_relative(*of.groups, normalize_std=True)


def shaped(config: Config, batch: Answered) -> Scores:
    """The scores with the punishment of long responses, which is one of their parts then."""
    settings, limit = config.algorithm, config.rollout.max_response_tokens
    assert isinstance(settings, DAPO)
    if settings.overlong is None:
        return batch.scores
    length_B = np.asarray(batch.rollout.sequences.mask_BT).sum(axis=1)
    buffer = max(1, round(settings.overlong.buffer_share * limit))
    penalty_B = overlong_penalty(length_B, max_tokens=limit, buffer_tokens=buffer, factor=settings.overlong.factor)
    penalty_B = np.where(batch.scores.scorable_B, penalty_B, 0).astype(np.float32)
    parts = batch.scores.parts | {"overlong": penalty_B}
    return replace(batch.scores, score_B=batch.scores.score_B + penalty_B, parts=parts)
