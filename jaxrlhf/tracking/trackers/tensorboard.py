"""Tracker for TensorBoard."""

import html
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from jaxrlhf.tracking.trackers.tracker import COLUMNS, TrackedRun, finite


class TensorBoard:
    """Event files in the phase's folder `tensorboard`, written by a thread.

    TensorBoard hides older events after the step from which the run is resumed; for a new run, all older events.
    """

    def __init__(self, run: TrackedRun) -> None:
        if "torch" in sys.modules:
            from tensorboardX import SummaryWriter
        else:
            sys.modules["torch"] = None  # type: ignore[assignment]  # tensorboardX would load it: 140 MB and 2 s
            try:
                from tensorboardX import SummaryWriter
            finally:
                del sys.modules["torch"]
        hidden_from = 0 if run.resumed_step is None else run.resumed_step + 1
        # The queue holds all numbers of a step: with the default of 10 the controller would wait for the thread.
        folder = str(run.directory / "tensorboard")
        self._writer = SummaryWriter(folder, purge_step=hidden_from, max_queue=1000, flush_secs=1)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in finite(metrics).items():
            self._writer.add_scalar(name, value, step)

    def table(self, step: int, name: str, rows: Sequence[Sequence[Any]]) -> None:
        lines = [COLUMNS, ["---"] * len(COLUMNS), *(map(_cell, row) for row in rows)]
        self._writer.add_text(name, "\n".join(f"| {' | '.join(line)} |" for line in lines), step)

    def close(self) -> None:
        self._writer.close()


def _cell(value: Any) -> str:
    """Format a value as the text of a cell of a Markdown table."""
    return html.escape("" if value is None else str(value)).replace("|", "&#124;").replace("\n", "<br>")
