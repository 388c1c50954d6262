"""Ranking of checkpoints by their metrics, which decides what a save deletes."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from orbax.checkpoint import checkpoint_managers

from jaxrlhf.checkpoint.damage import Damaged
from jaxrlhf.config.refusal import reason_of

_METRIC = "score"


class KeepBest(checkpoint_managers.PreservationPolicy):
    """Preservation policy that keeps the checkpoints with the highest metric, and none without a metric.

    Args:
      count: Number of checkpoints.
      metrics: Metrics by step.
    """

    def __init__(self, count: int, metrics: Mapping[int, float]) -> None:
        self._count, self._metrics = count, metrics

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        measured = [checkpoint for checkpoint in checkpoints if checkpoint.step in self._metrics]
        best = sorted(measured, key=lambda checkpoint: self._metrics[checkpoint.step], reverse=True)[: self._count]
        return [checkpoint in best for checkpoint in checkpoints]


def unchecked_metric(checkpoint: Path) -> float | None:
    """Return the metric of a checkpoint of an earlier version, which is in a file without a checksum; None without one.

    Raises:
      Damaged: The file holds something else.
    """
    file = checkpoint / "metrics" / "metrics"
    if not file.exists():
        return None
    try:
        metrics = json.loads(file.read_text())
        if not isinstance(metrics, dict) or metrics.keys() - {_METRIC}:
            raise ValueError(f"it holds something else than an object with {_METRIC!r}")
        metric = metrics.get(_METRIC)
        return None if metric is None else float(metric)
    except (ValueError, TypeError, OSError, RecursionError) as error:
        raise Damaged(f"{file} is damaged ({reason_of(error)}); move {checkpoint} to another folder") from error
