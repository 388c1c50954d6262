"""Groups of responses or episodes that continue from step to step, each token sampled by the then current policy.

Source: APRIL, active partial rollouts (Zhou et al. 2025, arXiv:2509.18521).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

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
class OpenGroups:
    """P groups of G responses or episodes that continue from step to step.

    Attributes:
      seed_P: int64 sampling seed of the whole group, kept until its end.
      started_P: int64 step in which each group was started.
      ended_B: bool, B = P * G responses or episodes, group by group: True if the last token was sampled.
      rollout: The B responses as far as they are sampled; the mask covers the sampled tokens, and images are only in
        the problems. None for episodes, which stay in their worker until the whole group has ended.
    """

    seed_P: np.ndarray
    started_P: np.ndarray
    ended_B: np.ndarray
    rollout: RolloutBatch | None = None

    @classmethod
    def begin(
        cls, count: int, *, copies: int, seed: int, step: int, rollout: RolloutBatch | None = None
    ) -> "OpenGroups":
        """Return groups of `copies` responses or episodes that start in a step.

        Args:
          rollout: Prompts of the responses, from `prompts_alone`; None for episodes.
        """
        ended_B = np.zeros(count * copies, bool)
        return cls(np.full(count, seed, np.int64), np.full(count, step, np.int64), ended_B, rollout)

    @property
    def copies(self) -> int:
        """G, number of responses or episodes of a group."""
        return len(self.ended_B) // len(self.started_P)

    @property
    def complete_P(self) -> np.ndarray:
        """bool, groups whose responses or episodes have all ended."""
        return np.asarray(self.ended_B.reshape(-1, self.copies).all(axis=1))

    @property
    def tokens(self) -> int:
        """Number of sampled tokens of the rollout."""
        return 0 if self.rollout is None else int(np.sum(self.rollout.sequences.mask_BT))

    def take(self, groups: Sequence[int] | np.ndarray) -> "OpenGroups":
        """Return the groups at these indices."""
        places = np.asarray(groups, np.int64)
        rows = (places[:, None] * self.copies + np.arange(self.copies)).ravel()
        rollout = None if self.rollout is None else self.rollout.take(rows)
        return OpenGroups(self.seed_P[places], self.started_P[places], self.ended_B[rows], rollout)

    def concat(self, other: "OpenGroups") -> "OpenGroups":
        """Return these groups followed by the other's."""
        return jax.tree.map(lambda *parts: np.concatenate(parts), self, other)


def prompts_alone(prompts: Sequence[Problem], *, width: int, most_kept: int = 0) -> RolloutBatch:
    """Return left-aligned arrays of `width` columns with one prompt per row and no response yet.

    Args:
      most_kept: K, maximum number of recorded candidates of a sampled token; 0 records none.
    """
    tokens, ids = [problem.prompt_tokens for problem in prompts], [problem.prompt_id for problem in prompts]
    sequences = Sequences.of(tokens, [()] * len(prompts), ids, width=width)
    if most_kept:
        kept_BTK = np.full((len(prompts), width, most_kept), -1, np.int32)
        sequences = replace(sequences, recorded={KEPT: kept_BTK})
    return RolloutBatch.unsampled(sequences)


def append(rollout: RolloutBatch, row: int, tokens: Sequence[int], logps: Sequence[float], *, version: int) -> slice:
    """Append tokens to a response, in place in a rollout's arrays; return their columns."""
    sequences = rollout.sequences
    start = int(sequences.length_B[row])
    columns = slice(start, start + len(tokens))
    sequences.token_BT[row, columns], sequences.mask_BT[row, columns] = tokens, True
    rollout.sampler_logp_BT[row, columns], rollout.version_BT[row, columns] = logps, version
    sequences.length_B[row] = columns.stop
    return columns
