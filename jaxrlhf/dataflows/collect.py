"""Collect functions, which gather the data of a step: records, scored responses or scored episodes.

Each is a function of the roles and the step's input. An algorithm names one as `collect`; the result goes to `learn`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxrlhf.batch import Array, Problem, RolloutBatch, Scores
from jaxrlhf.batching.transfer_protocol import join
from jaxrlhf.config import Algorithm, Config, PolicyGradient, Refusal, Sampling
from jaxrlhf.dataflows.batches.episodes import episode_metrics, scored_episodes
from jaxrlhf.dataflows.batches.scored import ScoredRollout, means_of_groups
from jaxrlhf.dataflows.step import Metrics, Roles, StepInput, value_of


def records(roles: Roles, work: StepInput[Algorithm]) -> Sequence[Problem]:
    """Return the step's records themselves, for an algorithm that learns from data alone."""
    return work.problems


def responses(roles: Roles, work: StepInput[Algorithm]) -> ScoredRollout:
    """Generate and score responses to the step's problems."""
    return respond(roles, work, work.problems)


def respond(
    roles: Roles,
    work: StepInput[Algorithm],
    problems: Sequence[Problem],
    *,
    sampling: Sampling | None = None,
    responses_per_prompt: int | None = None,
) -> ScoredRollout:
    """Generate responses to these problems and score them. None takes the value of the configuration's rollout.

    With groups in flight, the returned groups may answer problems of earlier steps: `ScoredRollout.problems` names
    their problems.
    """
    settings = work.config.rollout
    if sampling is None and responses_per_prompt is None and (groups := work.in_flight) is not None:
        assert work.draw_more is not None
        step, seed, draw_more = work.index, work.seed, work.draw_more
        chosen, sampled = groups.take(roles.actor, problems, step=step, seed=seed, draw_more=draw_more)
        return score(roles, work.config, chosen, sampled)
    copies = responses_per_prompt or settings.responses_per_prompt
    sampling = sampling or settings.sampling
    return generate_and_score(roles, work.config, problems, sampling, responses_per_prompt=copies, seed=work.seed)


def generate_and_score(
    roles: Roles,
    config: Config,
    problems: Sequence[Problem],
    sampling: Sampling,
    *,
    responses_per_prompt: int,
    seed: int,
) -> ScoredRollout:
    """Generate and score responses to problems or, with an environment, episodes that start from the problems."""
    how: dict[str, Any] = {"responses_per_prompt": responses_per_prompt, "seed": seed}
    return score(roles, config, problems, roles.actor.generate_sequences(problems, sampling, **how))


def score(roles: Roles, config: Config, problems: Sequence[Problem], rollout: Any) -> ScoredRollout:
    """Score responses or episodes that start from these problems, an equal number for each problem."""
    scores = roles.reward.compute_reward(problems, rollout)
    if config.environment is None:
        return ScoredRollout(problems, rollout, scores)
    return scored_episodes(config.environment, problems, value_of(rollout), value_of(scores))


Informative = Callable[[Scores, Array], Array]
"""`(scores, prompt_id_B) -> informative_B`: True for responses of groups to learn from."""


@dataclass(frozen=True)
class PromptGroups:
    """Problems, each with a group of responses or episodes in the same order.

    Attributes:
      informative_P: bool, groups to learn from.
      trained_B: bool, responses to train on if their group is informative; all responses take part in the baseline.
    """

    problems: Sequence[Problem]
    rollout: RolloutBatch
    scores: Scores
    informative_P: np.ndarray
    trained_B: np.ndarray

    @property
    def copies(self) -> int:
        """Number of responses of a group."""
        return len(self.scores.score_B) // len(self.problems)

    def concat(self, other: "PromptGroups") -> "PromptGroups":
        """Append the other's groups, except for prompts already present: each prompt has one group."""
        here = {problem.prompt_id for problem in self.problems}
        new = other.take(np.flatnonzero([problem.prompt_id not in here for problem in other.problems]))
        mine, theirs = (
            (groups.rollout, groups.scores, groups.informative_P, groups.trained_B) for groups in (self, new)
        )
        return PromptGroups([*self.problems, *new.problems], *join([mine, theirs]))

    def take(self, groups: np.ndarray) -> "PromptGroups":
        """Return the groups at these indices."""
        chosen = [self.problems[index] for index in groups]
        responses = (groups[:, None] * self.copies + np.arange(self.copies)).ravel()
        prompt_id_B = np.asarray(self.rollout.sequences.prompt_id_B)
        rows = np.concatenate([np.zeros(0, int), *(np.flatnonzero(prompt_id_B == own) for own in ids_of(chosen))])
        of_responses = self.scores, self.trained_B
        scores, trained_B = jax.tree.map(lambda value: np.asarray(value)[responses], of_responses)
        return PromptGroups(chosen, self.rollout.take(rows), scores, self.informative_P[groups], trained_B)

    def for_step(self, prompts: int) -> ScoredRollout:
        """Return `prompts` groups, informative groups first; other groups fill up the batch and are not trained on."""
        batch = self.take(np.argsort(~self.informative_P, kind="stable")[:prompts])
        metrics = self.metrics() | {"group/kept": float(batch.informative_P.sum())}
        trained_B = np.repeat(batch.informative_P, batch.copies) & batch.trained_B
        parts = batch.problems, batch.rollout, batch.scores, trained_B
        means_P = means_of_groups(self.scores, len(self.problems)).tolist()
        generated = dict(zip(ids_of(self.problems), means_P, strict=True))
        return ScoredRollout(*parts, metrics=metrics, generated_scores=generated)

    def metrics(self) -> Metrics:
        """Return metrics of all generated groups, including groups that the step leaves out."""
        scorable_B = np.asarray(self.scores.scorable_B)
        episodes = self.rollout.episodes
        return ({} if episodes is None else episode_metrics(episodes.records, scorable_B)) | {
            "group/generated": float(len(self.problems)),
            "group/flat_fraction": float(np.mean(~self.informative_P)),
            "score/generated_mean": float(np.mean(self.scores.score_B, where=scorable_B)),
            "tokens/generated": float(np.sum(self.rollout.sequences.mask_BT)),
        }


def dynamic_sampling(
    roles: Roles, work: StepInput[PolicyGradient], informative: Informative, *, max_rounds: int, wanted: str
) -> PromptGroups:
    """Dynamic sampling: generate and score groups for the step's problems, and for more until enough are informative.

    Source: Yu et al. 2025 (DAPO, arXiv:2503.14476), section 3.2.

    Args:
      max_rounds: Maximum number of batches of problems, including the step's own.
      wanted: Words after "responses" in the refusal, which say when a group is informative.

    Raises:
      Refusal: No group is informative.
    """
    assert work.draw_more is not None
    groups, rounds = _answer(roles, work, work.problems, informative), 1
    while groups.informative_P.sum() < work.config.rollout.prompts_per_step and rounds < max_rounds:
        groups, rounds = groups.concat(_answer(roles, work, work.draw_more(), informative)), rounds + 1
    if not groups.informative_P.any():
        raise Refusal(
            f"none of {len(groups.problems)} prompts got responses {wanted}, so there is nothing to learn from; "
            "choose problems that are neither too easy nor too hard, or raise rollout.responses_per_prompt or "
            f"algorithm.max_rounds={max_rounds}"
        )
    return groups


def _answer(
    roles: Roles, work: StepInput[PolicyGradient], problems: Sequence[Problem], informative: Informative
) -> PromptGroups:
    """Generate and score a group of responses to each problem."""
    sampled = respond(roles, work, problems)
    rollout, scores = value_of(sampled.rollout), value_of(sampled.scores)
    copies = work.config.rollout.responses_per_prompt
    informative_B = np.asarray(informative(scores, np.repeat(ids_of(sampled.problems), copies)))
    trained_B = np.ones(len(informative_B), bool) if sampled.trained_B is None else np.asarray(sampled.trained_B)
    return PromptGroups(sampled.problems, rollout, scores, informative_B[::copies], trained_B)


def ids_of(problems: Sequence[Problem]) -> list[int]:
    """Return the prompt ids of problems."""
    return [problem.prompt_id for problem in problems]
