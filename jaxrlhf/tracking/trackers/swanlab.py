"""Tracker for SwanLab."""

import json
import os
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from jaxrlhf.tracking.trackers.tracker import COLUMNS, PROJECT, TrackedRun, finite


class SwanLab:
    """Experiment of SwanLab; `SWANLAB_MODE=offline` stores it in the phase's folder until `swanlab sync`."""

    def __init__(self, run: TrackedRun) -> None:
        import swanlab

        identity = run.known_id("swanlab") or secrets.token_hex(10)
        self._new_table = swanlab.echarts.Table
        self._run = swanlab.init(
            project=os.environ.get("SWANLAB_PROJECT", PROJECT),
            name=run.name,
            id=identity,
            resume="allow",
            log_dir=str(run.directory / "swanlab"),
            config=json.loads(json.dumps(run.settings)),
        )
        run.keep_id("swanlab", identity)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(finite(metrics), step=step)

    def table(self, step: int, name: str, rows: Sequence[Sequence[Any]]) -> None:
        table = self._new_table()
        table.add(list(COLUMNS), [["" if cell is None else str(cell) for cell in row] for row in rows])
        self._run.log({name: table}, step=step)

    def close(self) -> None:
        self._run.finish()
