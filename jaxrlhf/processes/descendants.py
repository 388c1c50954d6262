"""Processes that a process has left behind, in whatever session."""

from contextlib import suppress
from pathlib import Path


def descendants(pid: int, mark: bytes) -> list[int]:
    """Processes that a process started, and those started by them, in whatever session; none where there is no /proc.

    Args:
      mark: An entry of the environment that they have inherited. One that has neither it nor a living ancestor is
        not found.
    """
    children: dict[int, list[int]] = {}
    found = []
    for status in Path("/proc").glob("[0-9]*/status"):
        with suppress(OSError, ValueError):
            process = int(status.parent.name)
            fields = dict(line.split(":", 1) for line in status.read_text().splitlines() if ":" in line)
            children.setdefault(int(fields["PPid"]), []).append(process)
            if mark in (status.parent / "environ").read_bytes().split(b"\0") and process != pid:
                found.append(process)
    queue = [pid]
    for parent in queue:
        queue += children.get(parent, [])
    return sorted({*found, *queue[1:]})
