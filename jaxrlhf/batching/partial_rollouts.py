"""Groups of responses, or of episodes, that go on from step to step, each token drawn by the policy of its own time.

Source: APRIL, active partial rollouts (Zhou et al. 2025, arXiv:2509.18521).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import jax
import numpy as np
from flax import struct

from jaxrlhf.batch import Problem, RolloutBatch, Sequences

GroupKey = tuple[int, int]
"""Prompt and step of beginning, by which a group is known from step to step."""

Versions = tuple[tuple[int, ...], ...]
"""Version of the policy that drew each reply of each episode of a group."""


@dataclass(frozen=True)
class Arrivals:
    """Arrivals of an earlier run, for a round to repeat.

    Attributes:
      now: Groups of episodes that arrive in this round, and no others do.
      versions: Versions of each group that is under way and arrives in this round or a later one.
    """

    now: frozenset[GroupKey]
    versions: Mapping[GroupKey, Versions]


@dataclass(frozen=True)
class Round:
    """End of a round: what has to be complete before the policy is updated.

    Attributes:
      complete: Groups that have to be complete, at least.
      groups: All groups under way, of which a rank has a part.
      due: Groups that were begun in this step or before have to be complete, too.
      repeated: Arrivals that end the round in place of these numbers.
    """

    complete: int
    groups: int
    due: int
    repeated: Arrivals | None = None

    def share(self, groups: int) -> "Round":
        """The end of a rank's round, which has so many of all groups; together ranks complete enough."""
        return Round(-(-self.complete * groups // self.groups), groups, self.due, self.repeated)

    def over(self, complete_P: np.ndarray, begun_P: np.ndarray) -> bool:
        """True if enough groups are complete, given the step in which each was begun."""
        return bool(complete_P.sum() >= self.complete and complete_P[begun_P <= self.due].all())


@struct.dataclass
class PartialRollout:
    """N groups of G responses, as far as they are drawn.

    Attributes:
      rollout: B = N * G rows, group by group; the mask covers what was drawn. Images are in the problems alone.
      seed_B: int64 seed that a response is drawn with from its first token to its last.
      ended_B: bool, the last token was drawn.
      begun_P: int64 step in which each group was begun.
      held_B: Keys and values that each response goes on from, `HeldCache`, or None where it has no slot; None where
        all are computed again.
    """

    rollout: RolloutBatch
    seed_B: np.ndarray
    ended_B: np.ndarray
    begun_P: np.ndarray
    held_B: np.ndarray | None = None

    @property
    def copies(self) -> int:
        """G, responses of a group."""
        return len(self.ended_B) // len(self.begun_P)

    @property
    def complete_P(self) -> np.ndarray:
        """bool, groups of which every response has ended."""
        return np.asarray(self.ended_B.reshape(-1, self.copies).all(axis=1))

    @property
    def tokens(self) -> int:
        """Tokens that were drawn."""
        return int(np.sum(self.rollout.sequences.mask_BT))

    def take(self, groups: Sequence[int] | np.ndarray) -> "PartialRollout":
        """The groups at these indices."""
        places = np.asarray(groups, np.int64)
        rows = (places[:, None] * self.copies + np.arange(self.copies)).ravel()
        parts = self.rollout, self.seed_B, self.ended_B, self.held_B
        rollout, seed_B, ended_B, held_B = jax.tree.map(lambda value: np.asarray(value)[rows], parts)
        return PartialRollout(rollout, seed_B, ended_B, self.begun_P[places], held_B)

    def holding(self, holds: bool) -> "PartialRollout":
        """These groups with keys and values to go on from, as far as they have them, or with none."""
        held_B = self.held_B if self.held_B is not None else np.full(len(self.ended_B), None)
        return replace(self, held_B=held_B if holds else None)

    def concat(self, other: "PartialRollout") -> "PartialRollout":
        """These groups, then the other's."""
        return jax.tree.map(lambda *parts: np.concatenate(parts), self, other)


@struct.dataclass
class OpenGroups:
    """Seeds, first steps and ends of P groups of episodes that go on from step to step.

    Attributes:
      seed_P: int64 seed that all of a group is drawn with.
      begun_P: int64 step in which each group was begun.
      ended_P: bool, all episodes of the group are over.
    """

    seed_P: np.ndarray
    begun_P: np.ndarray
    ended_P: np.ndarray

    @classmethod
    def begin(cls, count: int, *, seed: int, step: int) -> "OpenGroups":
        """Groups that begin in a step."""
        return cls(np.full(count, seed, np.int64), np.full(count, step, np.int64), np.zeros(count, bool))

    def take(self, groups: Sequence[int] | np.ndarray) -> "OpenGroups":
        """The groups at these indices."""
        return jax.tree.map(lambda value: value[np.asarray(groups, np.int64)], self)

    def concat(self, other: "OpenGroups") -> "OpenGroups":
        """These groups, then the other's."""
        return jax.tree.map(lambda *parts: np.concatenate(parts), self, other)


def not_begun(
    problems: Sequence[Problem], *, copies: int, seed: int, step: int, width: int, most_kept: int
) -> PartialRollout:
    """Groups of `copies` responses to these problems, of which no token is drawn.

    Args:
      width: T, columns of the arrays.
      most_kept: K, tokens at most that a recorded draw is among; 0 records none.
    """
    prompts = [problem for problem in problems for _ in range(copies)]
    return PartialRollout(
        prompts_alone(prompts, width=width, most_kept=most_kept),
        np.full(len(prompts), seed, np.int64),
        np.zeros(len(prompts), bool),
        np.full(len(problems), step, np.int64),
    )


def prompts_alone(prompts: Sequence[Problem], *, width: int, most_kept: int = 0) -> RolloutBatch:
    """Left-aligned arrays of `width` columns that hold a prompt a row and no response yet."""
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
            kept_BTK=np.full((*shape, most_kept), -1, np.int32) if most_kept else None,
        ),
        sampler_logp_BT=np.zeros(shape, np.float32),
        truncated_B=np.zeros(len(prompts), bool),
        version_BT=np.full(shape, -1, np.int32),
    )


def append(rollout: RolloutBatch, row: int, tokens: Sequence[int], logps: Sequence[float], *, version: int) -> slice:
    """Write tokens that a response goes on with into a rollout's arrays, in place; returns their columns."""
    sequences = rollout.sequences
    start = int(sequences.length_B[row])
    columns = slice(start, start + len(tokens))
    sequences.token_BT[row, columns], sequences.mask_BT[row, columns] = tokens, True
    rollout.sampler_logp_BT[row, columns], rollout.version_BT[row, columns] = logps, version
    sequences.length_B[row] = columns.stop
    return columns
