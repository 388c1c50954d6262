"""Dynamic sampling: drawing prompts until enough of them have groups of responses to learn from.

Source: Yu et al. 2025 (DAPO, arXiv:2503.14476), section 3.2.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import numpy as np

from jaxrlhf.batch import Array, Problem, RolloutBatch, Scores
from jaxrlhf.config import PolicyGradient, Refusal
from jaxrlhf.dataflows.step import Metrics, Roles, StepInput

Informative = Callable[[Scores, Array], Array]
"""`informative_B`, given the scores of some groups and the prompt ids of their responses."""


@dataclass(frozen=True)
class PromptGroups:
    """Problems with a group of responses to each, in the same order.

    Attributes:
      informative_P: bool, groups to learn from.
    """

    problems: Sequence[Problem]
    rollout: RolloutBatch
    scores: Scores
    informative_P: np.ndarray

    @property
    def copies(self) -> int:
        """Responses in a group."""
        return len(self.scores.score_B) // len(self.problems)

    @property
    def informative_B(self) -> np.ndarray:
        """bool, responses of groups to learn from."""
        return np.repeat(self.informative_P, self.copies)

    def concat(self, other: "PromptGroups") -> "PromptGroups":
        """These groups, then the other's but for prompts that are here: one prompt is one group."""
        here = {problem.prompt_id for problem in self.problems}
        new = other.take(np.flatnonzero([problem.prompt_id not in here for problem in other.problems]))
        mine, theirs = ((groups.rollout, groups.scores, groups.informative_P) for groups in (self, new))
        together = jax.tree.map(lambda *rows: np.concatenate(rows), mine, theirs)
        return PromptGroups([*self.problems, *new.problems], *together)

    def take(self, groups: np.ndarray) -> "PromptGroups":
        """The groups at these indices."""
        rows = (groups[:, None] * self.copies + np.arange(self.copies)).ravel()
        rollout, scores = jax.tree.map(lambda value: np.asarray(value)[rows], (self.rollout, self.scores))
        return PromptGroups([self.problems[index] for index in groups], rollout, scores, self.informative_P[groups])

    def batch(self, prompts: int) -> "PromptGroups":
        """The groups of a step, informative ones first.

        The others only fill the batch, which has one size, and are not to be trained on.
        """
        return self.take(np.argsort(~self.informative_P, kind="stable")[:prompts])

    def metrics(self) -> Metrics:
        """Metrics of all that was generated, before groups were left out."""
        scorable_B = np.asarray(self.scores.scorable_B)
        return {
            "group/generated": float(len(self.problems)),
            "group/flat_fraction": float(np.mean(~self.informative_P)),
            "score/generated_mean": float(np.mean(self.scores.score_B, where=scorable_B)),
            "tokens/generated": float(np.sum(self.rollout.sequences.mask_BT)),
        }


def dynamic_sampling(
    roles: Roles, work: StepInput[PolicyGradient], informative: Informative, *, max_rounds: int, wanted: str
) -> PromptGroups:
    """Generate and score groups for the step's problems, and for more until enough are informative.

    Args:
      max_rounds: Most times that problems are drawn, the step's own included.
      wanted: Words after "responses" that say what makes a group informative, for the refusal.

    Raises:
      Refusal: No group is informative.
    """
    assert work.draw_more is not None
    groups, rounds = _answer(roles, work, work.problems, informative), 1
    while groups.informative_P.sum() < work.config.rollout.prompts_per_step and rounds < max_rounds:
        groups, rounds = groups.concat(_answer(roles, work, work.draw_more(), informative)), rounds + 1
    if not groups.informative_P.any():
        raise Refusal(
            f"none of {len(groups.problems)} prompts got responses {wanted}, so there is nothing to "
            f"learn from; choose problems that are neither too easy nor too hard, draw more "
            f"rollout.responses_per_prompt, or raise algorithm.max_rounds={max_rounds}"
        )
    return groups


def _answer(
    roles: Roles, work: StepInput[PolicyGradient], problems: Sequence[Problem], informative: Informative
) -> PromptGroups:
    """Generate a group of responses to each problem, and score them."""
    settings = work.config.rollout
    rollout = roles.actor.generate_sequences(
        problems, settings.sampling, responses_per_prompt=settings.responses_per_prompt, seed=work.seed
    )
    scores: Scores = roles.reward.compute_reward(problems, rollout).result()
    informative_B = np.asarray(informative(scores, rollout.result().sequences.prompt_id_B))
    return PromptGroups(problems, rollout.result(), scores, informative_B[:: settings.responses_per_prompt])
