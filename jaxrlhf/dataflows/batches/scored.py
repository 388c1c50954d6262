"""Responses and their scores, which most algorithms learn from."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxrlhf.batch import Array, Problem, Scores
from jaxrlhf.dataflows.step import Metrics, value_of


@dataclass(frozen=True)
class ScoredRollout:
    """Responses and their scores, which may still be on their way.

    Attributes:
      problems: Problem of each group of responses.
      rollout: `RolloutBatch` of the responses, prompt-major, or its future.
      scores: `Scores` of the responses, or their future.
      trained_B: Scorable rows to train on, all of which take part in baselines; None is all.
      metrics: Numbers of what was generated and is not learnt from; they take the place of the rollout's own.
      record_E: `EpisodeRecord` of each episode, prompt-major; None where there is no environment.
      drawn_scores: Mean score of every group that was drawn, by prompt id, before shaping and NaN where none is known;
        empty where these groups are all and their scores as they were.
      beside: Further responses to the same problems, and their scores, if the algorithm compares with some or learns
        from them.
    """

    problems: Sequence[Problem]
    rollout: Any
    scores: Any
    trained_B: Array | None = None
    metrics: Metrics = field(default_factory=dict)
    record_E: np.ndarray | None = None
    drawn_scores: Mapping[int, float] = field(default_factory=dict)
    beside: "ScoredRollout | None" = None


def mean_scores(collected: ScoredRollout) -> np.ndarray:
    """`[P]` mean score over each problem's scorable responses; NaN where there are none."""
    return means_of_groups(value_of(collected.scores), len(collected.problems))


def means_of_groups(scores: Scores, groups: int) -> np.ndarray:
    """`[P]` mean score over the scorable responses of each of so many groups; NaN where there are none."""
    score_PG = np.asarray(scores.score_B, np.float64).reshape(groups, -1)
    scorable_PG = np.asarray(scores.scorable_B, bool).reshape(score_PG.shape)
    count_P = scorable_PG.sum(axis=1)
    total_P = np.where(scorable_PG, score_PG, 0.0).sum(axis=1)
    return np.where(count_P > 0, total_P / np.maximum(count_P, 1), np.nan)
