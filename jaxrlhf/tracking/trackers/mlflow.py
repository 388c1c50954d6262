"""Tracker for MLflow."""

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxrlhf.tracking.trackers.tracker import COLUMNS, PROJECT, TrackedRun, finite

_MAX_PARAMETERS = 100
"""Largest number of parameters in one request."""
_MAX_CHARACTERS = 6000
"""Largest length of a parameter's value."""


class MLflow:
    """Run of MLflow, at `MLFLOW_TRACKING_URI` or in MLflow's local store.

    Steps that a resumed run repeats are in a metric's history twice.
    """

    def __init__(self, run: TrackedRun) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        self._client, self._metric = MlflowClient(), Metric
        known = run.known_id("mlflow")
        if known is not None:
            self._id = known
            self._client.update_run(known, status="RUNNING")
            return
        named = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        experiment = self._client.get_experiment_by_name(named)
        experiment_id = self._client.create_experiment(named) if experiment is None else experiment.experiment_id
        self._id = self._client.create_run(experiment_id, run_name=run.name).info.run_id
        run.keep_id("mlflow", self._id)
        settings = [Param(name, str(value)[:_MAX_CHARACTERS]) for name, value in _flat(run.settings)]
        for first in range(0, len(settings), _MAX_PARAMETERS):
            self._client.log_batch(self._id, params=settings[first : first + _MAX_PARAMETERS])

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        now_ms = int(1000 * time.time())
        values = [self._metric(_metric_name(name), value, now_ms, step) for name, value in finite(metrics).items()]
        self._client.log_batch(self._id, metrics=values)

    def table(self, step: int, name: str, rows: Sequence[Sequence[Any]]) -> None:
        table = {"columns": list(COLUMNS), "data": [list(row) for row in rows]}  # the format of pandas, orient="split"
        self._client.log_dict(self._id, table, f"{name}/step_{step}.json")

    def close(self) -> None:
        self._client.set_terminated(self._id)


def _metric_name(name: str) -> str:
    """Replace characters that MLflow does not allow in a metric's name with dashes, as in `eval/pass@8`."""
    return "".join(one if one.isalnum() or one in "_-. :/" else "-" for one in name)


def _flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each setting with its dotted name."""
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value
