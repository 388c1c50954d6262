"""Responses and their scores, which most algorithms learn from."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxrlhf.batch import Array, Problem
from jaxrlhf.dataflows.step import Metrics


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
    """

    problems: Sequence[Problem]
    rollout: Any
    scores: Any
    trained_B: Array | None = None
    metrics: Metrics = field(default_factory=dict)
    record_E: np.ndarray | None = None
