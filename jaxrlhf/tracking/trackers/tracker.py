"""Trackers: services that keep the numbers and samples of many runs."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from jaxrlhf.tracking.metrics import Logger
from jaxrlhf.tracking.records import write_json
from jaxrlhf.tracking.samples import Sample

PROJECT = "jaxrlhf"
"""Project, or experiment, of runs; the packages' own environment variables name another."""
IDS = "trackers.json"
COLUMNS = ("step", "prompt", "response", "score", "parts", "answer", "response_length", "truncated")
"""Columns of a table of samples."""


class Tracker(Logger, Protocol):
    """Logger that takes samples too, as tables."""

    def table(self, step: int, name: str, rows: Sequence[Sequence[Any]]) -> None:
        """Keep rows of `COLUMNS` under a name."""
        ...


@dataclass(frozen=True)
class TrackedRun:
    """Phase of a run, as trackers know it.

    Attributes:
      directory: Folder of the phase, where trackers leave their own files and `trackers.json` its identities.
      settings: Configuration in JSON's types.
      resumed_step: Last step that is kept of what a tracker knows already; None starts a new run in every tracker.
    """

    name: str
    directory: Path
    settings: Mapping[str, Any]
    resumed_step: int | None = None

    def known_id(self, tracker: str) -> str | None:
        """Identity under which a tracker goes on with this run; None for a run that it does not know."""
        return None if self.resumed_step is None else self._ids().get(tracker)

    def keep_id(self, tracker: str, identity: str) -> None:
        """Write down the identity that a tracker knows this run by."""
        write_json(self.directory / IDS, {**self._ids(), tracker: identity})

    def _ids(self) -> dict[str, str]:
        file = self.directory / IDS
        return json.loads(file.read_text()) if file.exists() else {}


def finite(metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics that are finite."""
    return {name: value for name, value in metrics.items() if math.isfinite(value)}


def row_of(sample: Sample) -> tuple[Any, ...]:
    """Cells of a sample, one for each of `COLUMNS`; an episode's response is its conversation."""
    response, parts = sample.response, json.dumps(sample.parts)
    if sample.episode is not None:
        response = json.dumps(sample.episode["messages"], ensure_ascii=False, indent=1)
    cells = (sample.step, sample.prompt, response, sample.score, parts, sample.answer)
    return (*cells, sample.response_length, sample.truncated)
