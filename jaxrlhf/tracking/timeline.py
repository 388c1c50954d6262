"""Timeline of a run: a trace that Perfetto (ui.perfetto.dev) and chrome://tracing open."""

import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

ON_HOST = "(host)"
_END = b"]\n"


class Call(NamedTuple):
    """One call of a role's verb, as it ran; times are `time.perf_counter` seconds.

    Attributes:
      lane: The pool on whose devices it ran, one call after another; `ON_HOST` for calls that use none.
    """

    role: str
    verb: str
    start_s: float
    end_s: float
    lane: str


class StepCalls(NamedTuple):
    """A step and the calls that ran in it, in order of their end."""

    number: int
    start_s: float
    end_s: float
    calls: tuple[Call, ...]

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


class TimelineFile:
    """Appends calls to a trace in the JSON array format, one line of the picture for each role.

    That format may end after any event, so the trace of a running or killed run opens too; `close` makes it whole JSON.

    Args:
      resumed: Go on with an existing file; an event torn by a kill is cut off.
    """

    def __init__(self, path: Path, *, resumed: bool = False) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        whole = path.read_bytes() if resumed and path.exists() else b""
        kept = whole[: whole.rfind(b"\n") + 1] or b"[\n"
        if kept.endswith(_END):  # of a run that came to its end, and goes on
            kept = kept.removesuffix(_END).removesuffix(b"\n")
            kept += b"\n" if kept == b"[" else b",\n"
        self._file: BinaryIO = open(path, "wb")  # noqa: SIM115  open until close()
        self._file.write(kept)
        self._file.flush()
        self._lines: dict[str, int] = {}
        for line in kept.splitlines():  # a line of the picture has one role, whichever calls first now
            if line.startswith(b'{"ph": "M"'):
                event = json.loads(line.removesuffix(b","))
                self._lines.setdefault(event["args"]["name"], event["tid"])
        # Wall-clock time, so that the parts of a resumed run follow each other.
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
        """End the array, so that the file is JSON to any reader."""
        end = self._file.tell()
        with self._file:
            if end > len(b"[\n"):
                self._file.seek(end - len(b",\n"))
                self._file.truncate()
                self._file.write(b"\n")
            self._file.write(_END)
