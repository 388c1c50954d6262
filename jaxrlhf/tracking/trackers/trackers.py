"""Trackers of a run, by the names in its settings."""

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from importlib.util import find_spec

from jaxrlhf.config import Refusal
from jaxrlhf.tracking.samples import Sample, spread
from jaxrlhf.tracking.trackers.hosted import SwanLab, Trackio, WandB
from jaxrlhf.tracking.trackers.mlflow import MLflow
from jaxrlhf.tracking.trackers.tensorboard import TensorBoard
from jaxrlhf.tracking.trackers.tracker import TrackedRun, Tracker, row_of

KNOWN: Mapping[str, Callable[[TrackedRun], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": WandB,
    "mlflow": MLflow,
    "swanlab": SwanLab,
    "trackio": Trackio,
}
PACKAGES = {name: name for name in KNOWN} | {"tensorboard": "tensorboardX"}
ROWS = 8
"""Most samples in a table."""

_LOG = logging.getLogger(__name__)


def require_packages(names: Sequence[str]) -> None:
    """Refuse trackers whose package is not installed."""
    missing = [name for name in names if not _installed(PACKAGES[name])]
    if missing:
        raise Refusal(
            f"trackers={', '.join(missing)}: not installed; pip install 'jaxrlhf[{','.join(missing)}]', or remove "
            f"{'it' if len(missing) == 1 else 'them'} from trackers"
        )


def _installed(package: str) -> bool:
    found = find_spec(package)
    return found is not None and found.origin is not None  # a data folder of a tracker has no origin


class Trackers:
    """Group of all trackers of a phase, used as a single tracker.

    A service that fails during the run does not stop the run: its failure is a warning, and the phase's own files have
    all numbers and samples.

    Raises:
      Refusal: A tracker cannot be started, for example without its API key.
    """

    def __init__(self, names: Sequence[str], run: TrackedRun) -> None:
        self._trackers: dict[str, Tracker] = {}
        with ExitStack() as opened:
            for name in names:
                try:
                    self._trackers[name] = KNOWN[name](run)
                except Exception as error:
                    raise Refusal(
                        f"tracker {name} failed to start ({error!r}); fix the cause, or remove {name} from trackers"
                    ) from error
                opened.callback(self._trackers[name].close)
            opened.pop_all()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._for_each("the metrics", step, lambda tracker: tracker.log(step, metrics))

    def samples(self, name: str, samples: Sequence[Sample]) -> None:
        """Store some of a step's samples as a table, spread over all samples."""
        if not samples:
            return
        rows, step = [row_of(sample) for sample in spread(samples, ROWS)], samples[0].step
        self._for_each(f"the {name}", step, lambda tracker: tracker.table(step, name, rows))

    def close(self) -> None:
        self._for_each("the end", None, lambda tracker: tracker.close())

    def _for_each(self, what: str, step: int | None, call: Callable[[Tracker], None]) -> None:
        of = "" if step is None else f" of step {step}"
        for name, tracker in self._trackers.items():
            try:
                call(tracker)
            except Exception as error:
                _LOG.warning("%s failed to store %s%s; the run continues: %r", name, what, of, error)
