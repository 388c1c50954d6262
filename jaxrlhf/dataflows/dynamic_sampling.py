"""Drawing prompts until enough of them got groups of responses that teach something.

Source: Yu et al. 2025 (DAPO, arXiv:2503.14476), section 3.2: dynamic sampling.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import numpy as np

from jaxrlhf.batch import Array, Problem, Rollout, Scores
from jaxrlhf.config import Refusal
from jaxrlhf.dataflows.step import Metrics, StepInput
from jaxrlhf.single_controller.pools import Roles

Teaches = Callable[[Scores, Array], Array]
"""`teaches_B`, given the scores of some groups and the prompt ids of their responses."""


@dataclass(frozen=True)
class Answered:
    """Problems with a group of responses to each, in the same order.

    Attributes:
      teaches_P: Whether a group is worth an update.
    """

    problems: Sequence[Problem]
    rollout: Rollout
    scores: Scores
    teaches_P: np.ndarray

    @property
    def copies(self) -> int:
        """Responses in a group."""
        return len(self.scores.score_B) // len(self.problems)

    @property
    def teaches_B(self) -> np.ndarray:
        """Whether the group of a response is worth an update."""
        return np.repeat(self.teaches_P, self.copies)

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
        rows = (groups[:, None] * self.copies + np.arange(self.copies)).ravel()
        rollout, scores = jax.tree.map(lambda value: np.asarray(value)[rows], (self.rollout, self.scores))
        return Answered([self.problems[place] for place in groups], rollout, scores, self.teaches_P[groups])

    def batch(self, prompts: int) -> "Answered":
        """As many groups as a step takes, those that teach first.

        The others only fill the batch, which has one size, and are not to be trained on.
        """
        return self.chosen(np.argsort(~self.teaches_P, kind="stable")[:prompts])

    def metrics(self) -> Metrics:
        """Of all that was generated, before groups were left out."""
        scorable_B = np.asarray(self.scores.scorable_B)
        return {
            "group/generated": float(len(self.problems)),
            "group/flat_fraction": float(np.mean(~self.teaches_P)),
            "score/generated_mean": float(np.mean(self.scores.score_B, where=scorable_B)),
            "tokens/generated": float(np.sum(self.rollout.sequences.mask_BT)),
        }


def sampled(roles: Roles, work: StepInput, teaches: Teaches, *, max_rounds: int, otherwise: str) -> Answered:
    """Groups for the step's problems, and for further ones until enough of them teach or the rounds are over.

    Args:
      otherwise: What is wrong with groups that do not teach, as words after "responses".

    Raises:
      Refusal: No group teaches.
    """
    assert work.more is not None
    found, rounds = _answered(roles, work, work.problems, teaches), 1
    while found.teaches_P.sum() < work.config.rollout.prompts_per_step and rounds < max_rounds:
        found, rounds = found.joined(_answered(roles, work, work.more(), teaches)), rounds + 1
    if not found.teaches_P.any():
        raise Refusal(
            f"none of {len(found.problems)} prompts got responses {otherwise}, so there is nothing to "
            f"learn from; choose problems that are neither too easy nor too hard, draw more "
            f"rollout.responses_per_prompt, or raise algorithm.max_rounds={max_rounds}"
        )
    return found


def _answered(roles: Roles, work: StepInput, problems: Sequence[Problem], teaches: Teaches) -> Answered:
    """Generate a group of responses to each problem, and score them."""
    settings = work.config.rollout
    rollout = roles.actor.generate_sequences(
        problems, settings.sampling, responses_per_prompt=settings.responses_per_prompt, seed=work.seed
    )
    scores: Scores = roles.reward.compute_reward(problems, rollout).result()
    teaches_B = np.asarray(teaches(scores, rollout.result().sequences.prompt_id_B))
    return Answered(problems, rollout.result(), scores, teaches_B[:: settings.responses_per_prompt])
