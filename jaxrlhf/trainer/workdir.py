"""Workdir of a run: names of its entries, and the lock that keeps other runs out."""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from jaxrlhf.config import Refusal
from jaxrlhf.tracking import say

LOCK = "lock"
CHECKPOINTS = "checkpoints"
MODEL = "model"


@contextmanager
def locked(workdir: Path) -> Iterator[None]:
    """Make the folder and lock it within the block: another run would truncate this run's metrics and delete its saves.

    Raises:
      Refusal: The folder cannot be written to, or another run holds the lock.
    """
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
