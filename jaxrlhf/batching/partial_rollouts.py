"""Groups of responses or episodes that continue from step to step, each token sampled by the then current policy.

Source: APRIL, active partial rollouts (Zhou et al. 2025, arXiv:2509.18521).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import numpy as np
from flax import struct

from jaxrlhf.batch import KEPT, Problem, RolloutBatch, Sequences


@dataclass(frozen=True)
class Round:
    """Condition that ends a generation round: groups that must be complete before the policy is updated.

    Attributes:
      complete: Minimum number of complete groups.
      groups: Number of groups in progress over all ranks; each rank has a part of them.
      due: Step; groups started in this step or earlier must also be complete.
    """

    complete: int
    groups: int
    due: int

    def share(self, groups: int) -> "Round":
        """Return the condition for a rank with `groups` of all groups; together the ranks complete enough groups."""
        return Round(-(-self.complete * groups // self.groups), groups, self.due)

    def over(self, complete_P: np.ndarray, started_P: np.ndarray) -> bool:
        """Return True if enough groups, and all due groups, are complete.

        Args:
          started_P: Step in which each group was started.
        """
        return bool(complete_P.sum() >= self.complete and complete_P[started_P <= self.due].all())


@struct.dataclass
class PartialRollout:
    """N groups of G responses, as far as they are sampled.

    Attributes:
      rollout: B = N * G rows, group by group; the mask covers the sampled tokens. Images are only in the problems.
      seed_B: int64 seed of a response, for all of its tokens.
      ended_B: bool, the last token was sampled.
      started_P: int64 step in which each group was started.
    """

    rollout: RolloutBatch
    seed_B: np.ndarray
    ended_B: np.ndarray
    started_P: np.ndarray

    @property
    def copies(self) -> int:
        """G, number of responses of a group."""
        return len(self.ended_B) // len(self.started_P)

    @property
    def complete_P(self) -> np.ndarray:
        """bool, groups whose responses have all ended."""
        return np.asarray(self.ended_B.reshape(-1, self.copies).all(axis=1))

    @property
    def tokens(self) -> int:
        """Number of sampled tokens."""
        return int(np.sum(self.rollout.sequences.mask_BT))

    def take(self, groups: Sequence[int] | np.ndarray) -> "PartialRollout":
        """Return the groups at these indices."""
        places = np.asarray(groups, np.int64)
        rows = (places[:, None] * self.copies + np.arange(self.copies)).ravel()
        parts = self.rollout, self.seed_B, self.ended_B
        rollout, seed_B, ended_B = jax.tree.map(lambda value: np.asarray(value)[rows], parts)
        return PartialRollout(rollout, seed_B, ended_B, self.started_P[places])

    def concat(self, other: "PartialRollout") -> "PartialRollout":
        """Return these groups followed by the other's."""
        return jax.tree.map(lambda *parts: np.concatenate(parts), self, other)


@struct.dataclass
class OpenGroups:
    """Seeds, first steps and ends of P groups of episodes that continue from step to step.

    Attributes:
      seed_P: int64 sampling seed of the whole group.
      started_P: int64 step in which each group was started.
      ended_P: bool, all episodes of the group are over.
    """

    seed_P: np.ndarray
    started_P: np.ndarray
    ended_P: np.ndarray

    @classmethod
    def begin(cls, count: int, *, seed: int, step: int) -> "OpenGroups":
        """Return groups that start in a step."""
        return cls(np.full(count, seed, np.int64), np.full(count, step, np.int64), np.zeros(count, bool))

    def take(self, groups: Sequence[int] | np.ndarray) -> "OpenGroups":
        """Return the groups at these indices."""
        return jax.tree.map(lambda value: value[np.asarray(groups, np.int64)], self)

    def concat(self, other: "OpenGroups") -> "OpenGroups":
        """Return these groups followed by the other's."""
        return jax.tree.map(lambda *parts: np.concatenate(parts), self, other)


def unstarted_groups(
    problems: Sequence[Problem], *, copies: int, seed: int, step: int, width: int, most_kept: int
) -> PartialRollout:
    """Return groups of `copies` responses to these problems, with no token sampled yet.

    Args:
      width: T, number of columns of the arrays.
      most_kept: K, maximum number of recorded candidates of a sampled token; 0 records none.
    """
    prompts = [problem for problem in problems for _ in range(copies)]
    return PartialRollout(
        prompts_alone(prompts, width=width, most_kept=most_kept),
        np.full(len(prompts), seed, np.int64),
        np.zeros(len(prompts), bool),
        np.full(len(problems), step, np.int64),
    )


def prompts_alone(prompts: Sequence[Problem], *, width: int, most_kept: int = 0) -> RolloutBatch:
    """Return left-aligned arrays of `width` columns with one prompt per row and no response yet."""
    shape = len(prompts), width
    token_BT, length_B = np.zeros(shape, np.int32), np.zeros(len(prompts), np.int32)
    for row, problem in enumerate(prompts):
        length_B[row] = end = len(problem.prompt_tokens)
        token_BT[row, :end] = problem.prompt_tokens
    return RolloutBatch(
        sequences=Sequences(
            token_BT,
            length_B,
            np.zeros(shape, bool),
            np.array([problem.prompt_id for problem in prompts], np.int64),
            recorded={KEPT: np.full((*shape, most_kept), -1, np.int32)} if most_kept else {},
        ),
        sampler_logp_BT=np.zeros(shape, np.float32),
        truncated_B=np.zeros(len(prompts), bool),
        version_BT=np.full(shape, -1, np.int32),
    )


def append(rollout: RolloutBatch, row: int, tokens: Sequence[int], logps: Sequence[float], *, version: int) -> slice:
    """Append tokens to a response, in place in a rollout's arrays; return their columns."""
    sequences = rollout.sequences
    start = int(sequences.length_B[row])
    columns = slice(start, start + len(tokens))
    sequences.token_BT[row, columns], sequences.mask_BT[row, columns] = tokens, True
    rollout.sampler_logp_BT[row, columns], rollout.version_BT[row, columns] = logps, version
    sequences.length_B[row] = columns.stop
    return columns
