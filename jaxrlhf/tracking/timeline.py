"""Timeline of a run: a trace file for Perfetto (ui.perfetto.dev) and chrome://tracing."""

import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

ON_HOST = "(host)"
_END = b"]\n"


class Call(NamedTuple):
    """Completed call of a role's verb; times are `time.perf_counter` seconds.

    Attributes:
      lane: Pool of devices that ran the call, one call after another; `ON_HOST` for calls without devices.
    """

    role: str
    verb: str
    start_s: float
    end_s: float
    lane: str


class StepCalls(NamedTuple):
    """Step and its calls, in the order of their ends."""

    number: int
    start_s: float
    end_s: float
    calls: tuple[Call, ...]

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


class TimelineFile:
    """Trace file in the JSON array format, to which calls are appended; each role is a line of the picture.

    The format may end after any event, so viewers also open the trace of a running or killed run. `close` completes
    the JSON.

    Args:
      resumed: True to continue an existing file; an event truncated by a kill is removed.
    """

    def __init__(self, path: Path, *, resumed: bool = False) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        whole = path.read_bytes() if resumed and path.exists() else b""
        kept = whole[: whole.rfind(b"\n") + 1] or b"[\n"
        if kept.endswith(_END):  # the run had ended, and is now continued
            kept = kept.removesuffix(_END).removesuffix(b"\n")
            kept += b"\n" if kept == b"[" else b",\n"
        self._file: BinaryIO = open(path, "wb")  # noqa: SIM115  open until close()
        self._file.write(kept)
        self._file.flush()
        self._lines: dict[str, int] = {}
        for line in kept.splitlines():  # each role keeps its line, in whatever order roles call now
            if line.startswith(b'{"ph": "M"'):
                event = json.loads(line.removesuffix(b","))
                self._lines.setdefault(event["args"]["name"], event["tid"])
        # Offset to wall-clock time, so that the parts of a resumed run follow each other.
        self._offset_s = time.time() - time.perf_counter()

    def append(self, calls: Iterable[Call]) -> None:
        """Write calls that have ended."""
        for call in calls:
            if call.role not in self._lines:
                self._lines[call.role] = len(self._lines)
                self._write({"ph": "M", "name": "thread_name", "args": {"name": call.role}}, call.role)
            start_us, length_us = 1e6 * (call.start_s + self._offset_s), 1e6 * (call.end_s - call.start_s)
            self._write({"ph": "X", "name": call.verb, "ts": start_us, "dur": length_us}, call.role)
        self._file.flush()

    def _write(self, event: dict[str, Any], role: str) -> None:
        self._file.write(json.dumps(event | {"pid": 0, "tid": self._lines[role]}).encode() + b",\n")

    def close(self) -> None:
        """End the JSON array, so that any JSON reader can read the file."""
        end = self._file.tell()
        with self._file:
            if end > len(b"[\n"):
                self._file.seek(end - len(b",\n"))
                self._file.truncate()
                self._file.write(b"\n")
            self._file.write(_END)
