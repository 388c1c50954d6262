"""Interface of trackers: services that store the numbers and samples of many runs."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from jaxrlhf.config.refusal import read_object
from jaxrlhf.tracking.metrics import Logger
from jaxrlhf.tracking.records import write_json
from jaxrlhf.tracking.samples import Sample

PROJECT = "jaxrlhf"
"""Default project, or experiment, of runs; the packages' own environment variables override it."""
IDS = "trackers.json"
COLUMNS = ("step", "prompt", "response", "score", "parts", "answer", "response_length", "truncated")
"""Columns of a table of samples."""


class Tracker(Logger, Protocol):
    """Logger that also takes samples, as tables."""

    def table(self, step: int, name: str, rows: Sequence[Sequence[Any]]) -> None:
        """Store rows of `COLUMNS` under a name."""
        ...


@dataclass(frozen=True)
class TrackedRun:
    """Phase of a run, for trackers.

    Attributes:
      directory: Folder of the phase, for the trackers' own files and for `trackers.json` with the ids of the run.
      settings: Configuration in JSON's types.
      resumed_step: Last step before the resume; a tracker's later data are out of date. None starts a new run.
    """

    name: str
    directory: Path
    settings: Mapping[str, Any]
    resumed_step: int | None = None

    def known_id(self, tracker: str) -> str | None:
        """Return the id under which a tracker continues this run; None for a new run."""
        return None if self.resumed_step is None else self._ids().get(tracker)

    def keep_id(self, tracker: str, identity: str) -> None:
        """Store the tracker's id of this run."""
        write_json(self.directory / IDS, {**self._ids(), tracker: identity})

    def _ids(self) -> dict[str, str]:
        file = self.directory / IDS
        return read_object(file, "delete the file to start new runs of the trackers") if file.exists() else {}


def finite(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics that are finite."""
    return {name: value for name, value in metrics.items() if math.isfinite(value)}


def row_of(sample: Sample) -> tuple[Any, ...]:
    """Return the cells of a sample, one for each of `COLUMNS`; the response of an episode is its conversation."""
    response, parts = sample.response, json.dumps(sample.parts)
    if sample.episode is not None:
        response = json.dumps(sample.episode["messages"], ensure_ascii=False, indent=1)
    cells = (sample.step, sample.prompt, response, sample.score, parts, sample.answer)
    return (*cells, sample.response_length, sample.truncated)
