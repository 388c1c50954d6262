"""Tracker for Trackio."""

import os
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from jaxrlhf.tracking.trackers.tracker import COLUMNS, PROJECT, TrackedRun, finite


class Trackio:
    """Run of Trackio, in the local database that `trackio show` opens; `TRACKIO_DIR` names its folder.

    Trackio resumes a run by its name, so the name of a new run has a random suffix.
    """

    def __init__(self, run: TrackedRun) -> None:
        import trackio

        name = run.known_id("trackio") or f"{run.name}-{secrets.token_hex(3)}"
        self._table = trackio.Table
        self._run = trackio.init(
            project=os.environ.get("TRACKIO_PROJECT", PROJECT),
            name=name,
            resume="allow",
            config=dict(run.settings),
            embed=False,
        )
        run.keep_id("trackio", name)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(finite(metrics), step=step)

    def table(self, step: int, name: str, rows: Sequence[Sequence[Any]]) -> None:
        self._run.log({name: self._table(columns=list(COLUMNS), data=[list(row) for row in rows])}, step=step)

    def close(self) -> None:
        self._run.finish()
