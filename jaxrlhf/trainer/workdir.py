"""Workdir of a run: names of its entries, and the lock that keeps other runs out."""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from jaxrlhf.config import COLD_START, Refusal
from jaxrlhf.models.huggingface.hub import check_files
from jaxrlhf.single_controller.pools import REWARD_OUTPUT
from jaxrlhf.tracking import say
from jaxrlhf.tracking.files import (
    CURVE,
    EVALUATION,
    METRICS,
    SAMPLES,
    SETTINGS,
    STARTED_FROM,
    TIMELINE,
    TIMELINE_PICTURE,
)

LOCK = "lock"
CHECKPOINTS = "checkpoints"
MODEL = "model"

_FILES = LOCK, METRICS, SAMPLES, EVALUATION, CURVE, TIMELINE, TIMELINE_PICTURE, SETTINGS, STARTED_FROM, REWARD_OUTPUT
_FOLDERS = CHECKPOINTS, MODEL, COLD_START


@contextmanager
def locked(workdir: Path) -> Iterator[None]:
    """Make the folder and lock it within the block: another run would truncate this run's metrics and delete its saves.

    Raises:
      Refusal: The folder cannot be written to, something else has the name of a run's file or folder, or another run
        holds the lock.
    """
    paths = {workdir / name: Path.is_file for name in _FILES} | {workdir / name: Path.is_dir for name in _FOLDERS}
    for path, expected in paths.items():
        if path.exists() and not expected(path):  # a pipe would make the run wait for a reader
            kind = "folder" if expected is Path.is_dir else "regular file"
            raise Refusal(f"{path} is no {kind}, which a run writes there; move it away, or choose another workdir")
    check_files(workdir / MODEL)
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        lock = open(workdir / LOCK, "w")  # noqa: SIM115  open until the end of the block
    except OSError as error:
        raise Refusal(f"workdir {workdir} is not writable: {error}; choose another workdir") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise Refusal(
                f"another run is using the workdir {workdir}; wait for its end, or choose another workdir"
            ) from error
        except OSError as error:
            say(f"{workdir} is on a file system without locks ({error}); make sure that no other run uses the folder")
        yield
