"""Trackers for Weights & Biases, SwanLab and Trackio, whose packages all start a run with `init`."""

import json
import os
import secrets
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

from jaxrlhf.tracking.trackers.tracker import COLUMNS, PROJECT, TrackedRun, finite


class HostedRun:
    """Run of a tracking service.

    Args:
      package: Name of the service's package.
      identity: Id under which a resumed run is continued.
      options: Further arguments of the package's `init`.
    """

    def __init__(self, run: TrackedRun, package: str, identity: str, **options: Any) -> None:
        self._package = import_module(package)
        project, config = os.environ.get(f"{package.upper()}_PROJECT", PROJECT), json.loads(json.dumps(run.settings))
        self._run = self._package.init(project=project, resume="allow", config=config, **options)
        run.keep_id(package, identity)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(finite(metrics), step=step)

    def table(self, step: int, name: str, rows: Sequence[Sequence[Any]]) -> None:
        self._run.log({name: self._table(rows)}, step=step)

    def _table(self, rows: Sequence[Sequence[Any]]) -> Any:
        return self._package.Table(columns=list(COLUMNS), data=[list(row) for row in rows])

    def close(self) -> None:
        self._run.finish()


class WandB(HostedRun):
    """Run of Weights & Biases; `WANDB_MODE=offline` stores it in the phase's folder until `wandb sync`.

    The step counter of wandb cannot go back as a resumed run does, so all metrics are plotted over a metric `step`.
    """

    def __init__(self, run: TrackedRun) -> None:
        identity = run.known_id("wandb") or secrets.token_hex(4)
        super().__init__(run, "wandb", identity, name=run.name, id=identity, dir=str(run.directory))
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({"step": step, **finite(metrics)})

    def table(self, step: int, name: str, rows: Sequence[Sequence[Any]]) -> None:
        self._run.log({"step": step, name: self._table(rows)})


class SwanLab(HostedRun):
    """Experiment of SwanLab; `SWANLAB_MODE=offline` stores it in the phase's folder until `swanlab sync`."""

    def __init__(self, run: TrackedRun) -> None:
        identity = run.known_id("swanlab") or secrets.token_hex(10)
        super().__init__(run, "swanlab", identity, name=run.name, id=identity, log_dir=str(run.directory / "swanlab"))

    def _table(self, rows: Sequence[Sequence[Any]]) -> Any:
        table = self._package.echarts.Table()
        table.add(list(COLUMNS), [["" if cell is None else str(cell) for cell in row] for row in rows])
        return table


class Trackio(HostedRun):
    """Run of Trackio, in the local database that `trackio show` opens; `TRACKIO_DIR` names its folder.

    Trackio resumes a run by its name, so the name of a new run has a random suffix.
    """

    def __init__(self, run: TrackedRun) -> None:
        name = run.known_id("trackio") or f"{run.name}-{secrets.token_hex(3)}"
        super().__init__(run, "trackio", name, name=name, embed=False)
