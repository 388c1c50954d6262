"""Descendant processes in any session: adopt, find and kill the processes that a process leaves behind."""

import ctypes
import os
import signal
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def adopt_orphans() -> None:
    """Make this process the new parent of its orphaned descendants, so that `descendants` finds them; Linux only."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_with_parent() -> None:
    """Let the kernel kill this process when its parent dies; Linux only."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def kill(pids: Iterable[int]) -> None:
    """Kill processes with SIGKILL; skip processes that are gone or that this process may not kill."""
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def descendants(pid: int, mark: bytes) -> list[int]:
    """Return the ids of all descendants of a process, in any session; empty on systems without /proc.

    Args:
      mark: Environment entry, `NAME=value`, that identifies descendants which inherited it; empty searches by parent
        process only. A descendant without the mark and without a living ancestor is not found.
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
    """Return the ids of a process's direct children, including zombies; empty on systems without /proc."""
    found: list[int] = []
    with suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with suppress(OSError), open(f"/proc/{pid}/task/{task}/children", "rb", buffering=0) as file:
                found += map(int, file.read().split())
    return found
