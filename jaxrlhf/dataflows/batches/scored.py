"""Scored rollouts, the data that most algorithms learn from."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxrlhf.batch import Array, Problem, Scores
from jaxrlhf.dataflows.step import Metrics, value_of


@dataclass(frozen=True)
class ScoredRollout:
    """Responses and their scores; either may still be a future.

    Attributes:
      problems: Problem of each group of responses.
      rollout: `RolloutBatch` of the responses, prompt-major, or its future.
      scores: `Scores` of the responses, or their future.
      trained_B: bool, rows to train on; all scorable rows take part in baselines. None trains on all rows.
      metrics: Metrics of everything generated, left-out groups included; they override the rollout's own metrics.
      generated_scores: Unshaped mean score of every generated group, by prompt id; NaN if unknown. Empty if `scores`
        already has all of them.
      beside: Further responses to the same problems, with scores, if the algorithm compares with them or learns from
        them.
    """

    problems: Sequence[Problem]
    rollout: Any
    scores: Any
    trained_B: Array | None = None
    metrics: Metrics = field(default_factory=dict)
    generated_scores: Mapping[int, float] = field(default_factory=dict)
    beside: "ScoredRollout | None" = None


def mean_scores(collected: ScoredRollout) -> np.ndarray:
    """Return the `[P]` mean score over each problem's scorable responses; NaN if there are none."""
    return means_of_groups(value_of(collected.scores), len(collected.problems))


def means_of_groups(scores: Scores, groups: int) -> np.ndarray:
    """Return the `[P]` mean score over the scorable responses of each of `groups` groups; NaN if there are none."""
    score_PG = np.asarray(scores.score_B, np.float64).reshape(groups, -1)
    scorable_PG = np.asarray(scores.scorable_B, bool).reshape(score_PG.shape)
    count_P = scorable_PG.sum(axis=1)
    total_P = np.where(scorable_PG, score_PG, 0.0).sum(axis=1)
    return np.where(count_P > 0, total_P / np.maximum(count_P, 1), np.nan)
