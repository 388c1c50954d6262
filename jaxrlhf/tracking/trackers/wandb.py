"""Tracker for Weights & Biases."""

import os
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from jaxrlhf.tracking.trackers.tracker import COLUMNS, PROJECT, TrackedRun, finite


class WandB:
    """Run of Weights & Biases; `WANDB_MODE=offline` stores it in the phase's folder until `wandb sync`.

    The step counter of wandb cannot go back as a resumed run does, so all metrics are plotted over a metric `step`.
    """

    def __init__(self, run: TrackedRun) -> None:
        import wandb

        identity = run.known_id("wandb") or secrets.token_hex(4)
        self._table = wandb.Table
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=run.name,
            id=identity,
            resume="allow",
            dir=str(run.directory),
            config=dict(run.settings),
        )
        run.keep_id("wandb", identity)
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({"step": step, **finite(metrics)})

    def table(self, step: int, name: str, rows: Sequence[Sequence[Any]]) -> None:
        self._run.log({"step": step, name: self._table(columns=list(COLUMNS), data=[list(row) for row in rows])})

    def close(self) -> None:
        self._run.finish()
