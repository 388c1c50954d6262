"""Metrics of each step, sent to every logger."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Protocol

from jaxrlhf.tracking.records import RecordFile


class Logger(Protocol):
    """Destination of metrics. To add a destination, write a class with these two methods."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class MetricsWriter:
    """Writer of metrics to several loggers, in order."""

    def __init__(self, loggers: Sequence[Logger]) -> None:
        self._loggers = tuple(loggers)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log numbers under names such as `score/mean`."""
        plain = {name: float(value) if hasattr(value, "item") else value for name, value in metrics.items()}
        for logger in self._loggers:
            logger.log(step, plain)

    def close(self) -> None:
        """Close every logger, even if closing one of them fails."""
        with ExitStack() as stack:
            for logger in reversed(self._loggers):
                stack.callback(logger.close)

    def __enter__(self) -> "MetricsWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class JsonLines(RecordFile):
    """File `metrics.jsonl`: one object per step, `step` first; numbers that are not finite are null."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.append([{"step": step, **metrics}])
