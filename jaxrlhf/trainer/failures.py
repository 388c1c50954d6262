"""Failures of a run: full disks, failures during cleanup, and one message in place of a traceback."""

import errno
import os
import resource
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from jaxrlhf.batch import Diverged
from jaxrlhf.rewards import RewardsFailing
from jaxrlhf.single_controller.ray.failure import HostFailure

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class DiskFull(OSError):
    """Error: a file could not be written because its disk or its owner's quota is full, or because of a limit on files.

    Args:
      place: File or folder that was to be written.
    """

    def __init__(self, place: Path) -> None:
        there = next(folder for folder in (place, *place.absolute().parents) if folder.exists())
        free, total = shutil.disk_usage(there).free, shutil.disk_usage(there).total
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
        most = "" if limit == resource.RLIM_INFINITY else f", and a file may have {limit / 1e6:.1f} MB (ulimit -f)"
        super().__init__(
            f"no space left to write {place}: {free / 1e6:.1f} of {total / 1e6:.0f} MB are free there{most}"
        )


@contextmanager
def writing(place: Path) -> Iterator[None]:
    """Turn any full-disk error of the block, also from libraries, into `DiskFull`.

    Args:
      place: File or folder that the block writes, since write errors do not name it.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, DiskFull) or not _says_full(error):
            raise
        raise DiskFull(place) from error


def _says_full(error: BaseException | None) -> bool:
    """Return True if the error, or a cause of the error, says that a disk is full."""
    seen = set()
    while error is not None and id(error) not in seen:  # two failures of one host may name each other as cause
        seen.add(id(error))
        # tensorstore and safetensors put the system's message into the text of their own errors.
        if getattr(error, "errno", None) in _FULL or any(os.strerror(code) in str(error) for code in _FULL):
            return True
        error = error.__cause__ or error.__context__
    return False


@contextmanager
def afterwards(task: str, end: Callable[[], None]) -> Iterator[None]:
    """Call `end` after the block; if the block failed, a failure of `end` becomes a note on the first one."""
    try:
        yield
    except BaseException as error:
        try:
            end()
        except Exception as other:
            if not (isinstance(error, DiskFull) and isinstance(other, DiskFull)):  # a repetition
                error.add_note(f"and {task} failed: {other!r}")
        raise
    end()


@contextmanager
def one_message() -> Iterator[None]:
    """End the program with one message and exit code 1 on failures that a traceback would not explain better.

    JAXRLHF_DEBUG=1 keeps the traceback.
    """
    before, sys.unraisablehook = sys.unraisablehook, _print
    try:
        yield
    except (OSError, Diverged, HostFailure, RewardsFailing) as failure:
        full = isinstance(failure, DiskFull) or getattr(failure, "errno", None) in _FULL  # such as standard output's
        if os.environ.get("JAXRLHF_DEBUG") == "1" or (isinstance(failure, OSError) and not full):
            raise
        print("\n".join([f"error: {failure}", *getattr(failure, "__notes__", [])]), file=sys.stderr, flush=True)
        if full:
            with suppress(OSError):
                sys.stdout.flush()
            os._exit(1)  # at the interpreter's end libraries would try to write once more, and print tracebacks
        sys.exit(1)
    finally:
        sys.unraisablehook = before


def _print(unraisable: Any) -> None:
    """Print an error that nothing can catch, unless it repeats a failed save, whose event loop is closed."""
    if str(unraisable.exc_value) != "Event loop is closed":
        sys.__unraisablehook__(unraisable)
