"""DAPO: GRPO on groups that have something to compare, without a word on responses that were cut off.

Source: Yu et al. 2025 (arXiv:2503.14476).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax
import numpy as np

from jaxrlhf.algos import group_relative, has_spread, overlong_penalty
from jaxrlhf.batch import Array, Problem, Rollout, Scores
from jaxrlhf.config import DAPO, Config
from jaxrlhf.controller.critic_free import Rewarded, learn
from jaxrlhf.controller.step import Metrics, StepInput, StepResult
from jaxrlhf.workers import Roles


@dataclass(frozen=True)
class Answered:
    """Problems with a group of responses to each, in the same order.

    Attributes:
      teaches_P: Whether a group's scores differ.
    """

    problems: Sequence[Problem]
    rollout: Rollout
    scores: Scores
    teaches_P: np.ndarray

    def joined(self, other: "Answered") -> "Answered":
        """These groups, and then the other's but for prompts that are here: one prompt is one group."""
        here = {problem.prompt_id for problem in self.problems}
        new = other.chosen(np.flatnonzero([problem.prompt_id not in here for problem in other.problems]))
        mine, theirs = ((one.rollout, one.scores, one.teaches_P) for one in (self, new))
        return Answered(
            [*self.problems, *new.problems], *jax.tree.map(lambda *rows: np.concatenate(rows), mine, theirs)
        )

    def chosen(self, groups: np.ndarray) -> "Answered":
        """The groups at these places."""
        copies = len(self.scores.score_B) // len(self.problems)
        rows = (groups[:, None] * copies + np.arange(copies)).ravel()
        rollout, scores = jax.tree.map(lambda value: np.asarray(value)[rows], (self.rollout, self.scores))
        return Answered([self.problems[place] for place in groups], rollout, scores, self.teaches_P[groups])


def step(roles: Roles, work: StepInput) -> StepResult:
    """One DAPO iteration: sample until enough groups have spread, shape, filter, learn."""
    settings, sampling = work.config.algorithm, work.config.rollout
    assert isinstance(settings, DAPO)
    found = sampled(roles, work, settings)
    # Groups without spread come last. They only fill the batch, which has one size, and are not trained on.
    batch = found.chosen(np.argsort(~found.teaches_P, kind="stable")[: sampling.prompts_per_step])
    trained_B = np.repeat(batch.teaches_P, sampling.responses_per_prompt)
    if settings.mask_truncated:
        trained_B &= ~np.asarray(batch.rollout.truncated_B)
    scores = shaped(work.config, batch)
    result = learn(roles, work, batch.rollout, scores, advantage, trained_B=trained_B)
    metrics = result.metrics | sampling_metrics(found) | {"group/kept": float(batch.teaches_P.sum())}
    return replace(result, metrics=metrics, problems=batch.problems)


def advantage(of: Rewarded) -> Array:
    """GRPO's."""
    return group_relative(*of.groups, normalize_std=True)


def sampled(roles: Roles, work: StepInput, settings: DAPO) -> Answered:
    """Groups for the step's problems, and for further ones until enough have spread or the rounds are over.

    Raises:
      ValueError: No group has spread.
    """
    assert work.more is not None
    found, rounds = answered(roles, work, work.problems), 1
    while found.teaches_P.sum() < work.config.rollout.prompts_per_step and rounds < settings.max_rounds:
        found, rounds = found.joined(answered(roles, work, work.more())), rounds + 1
    if not found.teaches_P.any():
        raise ValueError(
            f"none of {len(found.problems)} prompts got responses that score differently, so there is nothing to "
            f"learn from; choose problems that are neither too easy nor too hard, draw more "
            f"rollout.responses_per_prompt, or raise algorithm.max_rounds={settings.max_rounds}"
        )
    return found


def answered(roles: Roles, work: StepInput, problems: Sequence[Problem]) -> Answered:
    """Generate a group of responses to each problem, and score them."""
    settings = work.config.rollout
    rollout = roles.actor.generate_sequences(
        problems, settings.sampling, responses_per_prompt=settings.responses_per_prompt, seed=work.seed
    )
    scores: Scores = roles.reward.compute_reward(problems, rollout).result()
    prompt_id_B = rollout.result().sequences.prompt_id_B
    teaches_B = np.asarray(has_spread(scores.score_B, scores.scorable_B, prompt_id_B))
    return Answered(problems, rollout.result(), scores, teaches_B[:: settings.responses_per_prompt])


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


def sampling_metrics(found: Answered) -> Metrics:
    """Of all that was generated, before groups were left out."""
    scorable_B = np.asarray(found.scores.scorable_B)
    return {
        "group/generated": float(len(found.problems)),
        "group/flat_fraction": float(np.mean(~found.teaches_P)),
        "score/generated_mean": float(np.mean(found.scores.score_B, where=scorable_B)),
        "tokens/generated": float(np.sum(found.rollout.sequences.mask_BT)),
    }
