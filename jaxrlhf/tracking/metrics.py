"""Numbers of each step, sent to every logger."""

import math
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol

from jaxrlhf.tracking.records import RecordFile


class Logger(Protocol):
    """Destination of metrics. Write a class with these two methods to add one."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class MetricsWriter:
    """Sends metrics to several loggers, in order."""

    def __init__(self, loggers: Sequence[Logger]) -> None:
        self._loggers = tuple(loggers)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log numbers under names such as `score/mean`."""
        plain = {name: float(value) if hasattr(value, "item") else value for name, value in metrics.items()}
        for logger in self._loggers:
            logger.log(step, plain)

    def close(self) -> None:
        """Close every logger, also if one of them fails to."""
        with ExitStack() as stack:
            for logger in reversed(self._loggers):
                stack.callback(logger.close)

    def __enter__(self) -> "MetricsWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class JsonLines:
    """`metrics.jsonl`: an object a step, `step` first; numbers that are not finite are null.

    Args:
      resumed_step: See `RecordFile`.
    """

    def __init__(self, path: Path, *, resumed_step: int | None = None) -> None:
        self._file = RecordFile(path, resumed_step=resumed_step)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._file.append([{"step": step, **metrics}])

    def close(self) -> None:
        self._file.close()


class TensorBoard:
    """Event files for TensorBoard, written by a thread; numbers that are not finite are left out.

    Args:
      resumed_step: TensorBoard hides what was logged into the directory after this step; None hides all of it.
    """

    def __init__(self, directory: Path, *, resumed_step: int | None = None) -> None:
        if "torch" in sys.modules:
            from tensorboardX import SummaryWriter
        else:
            sys.modules["torch"] = None  # type: ignore[assignment]  # tensorboardX would load it: 140 MB and 2 s
            try:
                from tensorboardX import SummaryWriter
            finally:
                del sys.modules["torch"]
        hidden_from = 0 if resumed_step is None else resumed_step + 1
        # A queue that takes a step's numbers at once: with the default of 10 the controller waits for the thread.
        self._writer = SummaryWriter(str(directory), purge_step=hidden_from, max_queue=1000, flush_secs=1)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            if math.isfinite(value):
                self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()
