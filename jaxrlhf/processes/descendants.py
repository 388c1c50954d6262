"""Processes that a process has left behind, in whatever session."""

import ctypes
import os
import signal
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """Have processes below this one that lose their parent become its children, so that they are found; on Linux."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


@contextmanager
def ends_descendants() -> Iterator[None]:
    """End all processes below this one after the block, daemons that it has adopted included."""
    try:
        yield
    finally:
        kill(descendants(os.getpid(), b""))


def kill(pids: Iterable[int]) -> None:
    """End processes by force, those that are there and may be ended."""
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def descendants(pid: int, mark: bytes) -> list[int]:
    """Processes that a process started, and those started by them, in whatever session; none where there is no /proc.

    Args:
      mark: An entry of the environment that they have inherited; empty goes by ancestors alone. One that has neither
        it nor a living ancestor is not found.
    """
    children: dict[int, list[int]] = {}
    found = []
    for status in Path("/proc").glob("[0-9]*/status"):
        with suppress(OSError, ValueError):
            process = int(status.parent.name)
            fields = dict(line.split(":", 1) for line in status.read_text().splitlines() if ":" in line)
            children.setdefault(int(fields["PPid"]), []).append(process)
            if mark and mark in (status.parent / "environ").read_bytes().split(b"\0") and process != pid:
                found.append(process)
    queue = [pid]
    for parent in queue:
        queue += children.get(parent, [])
    return sorted({*found, *queue[1:]})


def children(pid: int) -> list[int]:
    """Processes whose parent a process is, dead ones that are not reaped included; none where there is no /proc."""
    found: list[int] = []
    with suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with suppress(OSError), open(f"/proc/{pid}/task/{task}/children", "rb", buffering=0) as file:
                found += map(int, file.read().split())
    return found
