"""Files of the runs below a folder, read while the runs write them."""

import json
import os
import re
import stat
import threading
from collections import deque
from itertools import pairwise
from pathlib import Path
from typing import Any

from jaxrlhf.config import Refusal
from jaxrlhf.config.refusal import read_object, reason_of
from jaxrlhf.tracking import read_records
from jaxrlhf.tracking.files import EVALUATION, METRICS, SAMPLES, SETTINGS, TIMELINE
from jaxrlhf.tracking.records import lines_of

SAMPLE_FILES = {"samples": SAMPLES, "evaluation": EVALUATION}
LATEST_EVENTS = 5000
"""Number of calls of a timeline that are shown: the last calls."""
LARGEST_SETTINGS = 1 << 24
"""Largest size in bytes of a file of settings, which is read as a whole."""
_STEP = re.compile(rb'^\{"step": (-?\d+)\b')


class RunFiles:
    """Runs in the folders below a root; no file outside of the root is read, neither by `..` nor by links.

    Args:
      root: Folder whose runs are shown; it may be the workdir of a run itself.

    Raises:
      Refusal: There is no such folder.
    """

    def __init__(self, root: Path) -> None:
        if not root.is_dir():
            raise Refusal(f"{root} is no folder; give the folder that has the workdirs of runs, such as runs/")
        self.root = root.resolve()
        self._metrics: dict[Path, tuple[tuple[int, int], list[dict[str, Any]]]] = {}
        self._indices: dict[Path, StepIndex] = {}

    def runs(self) -> list[dict[str, Any]]:
        """List runs and cold starts by path below the root, with their last step and number of metric records.

        A run has the reason as `unreadable` if its metrics cannot be read or come from another program, or if its
        metrics or settings are a link to themselves.
        """
        found = []
        for metrics in sorted(self.root.rglob(METRICS)):
            run = metrics.parent.relative_to(self.root).as_posix()
            try:
                if not _target(metrics).is_relative_to(self.root):
                    continue
                _target(metrics.with_name(SETTINGS))
                records = self._records(metrics)
                found.append(
                    {
                        "run": run,
                        "records": len(records),
                        "last_step": records[-1]["step"] if records else 0,
                        "changed": metrics.stat().st_mtime,
                        "has": [name for name, file in SAMPLE_FILES.items() if (metrics.parent / file).is_file()],
                    }
                )
            except FileNotFoundError:  # deleted meanwhile
                continue
            except (Refusal, OSError, RecursionError, KeyError, TypeError) as error:
                reason = f"{metrics}: {reason_of(error)}"
                found.append({"run": run, "records": 0, "last_step": 0, "has": [], "unreadable": reason})
        return found

    def metrics(self, run: str) -> list[dict[str, Any]]:
        """Return the records of a run's metrics."""
        return self._records(self._file(run, METRICS))

    def steps(self, run: str, kind: str) -> dict[int, int]:
        """Return the steps that have samples, each with the size of its samples in bytes."""
        return self._index(run, kind).sizes()

    def samples(self, run: str, kind: str, step: int) -> list[dict[str, Any]]:
        """Return the samples of a step; an empty list if the step has none."""
        return self._index(run, kind).read(step)

    def settings(self, run: str) -> dict[str, Any]:
        """Return the settings of a run by their dotted names; for a cold start, the settings of its run."""
        folder = self._folder(run)
        for place in (folder, folder.parent):
            file = _target(place / SETTINGS)
            if file.exists() and file.is_relative_to(self.root):
                if (size := file.stat().st_size) > LARGEST_SETTINGS:
                    raise Refusal(f"{file} has {size} bytes, expected at most {LARGEST_SETTINGS}; restore the file")
                return dict(_flat(read_object(file, "restore the file")))
        return {}

    def timeline(self, run: str) -> list[dict[str, Any]]:
        """Return the last calls of a run: role, verb, start in seconds since 1970, and length in seconds."""
        file = self._file(run, TIMELINE)
        roles: dict[int, str] = {}
        calls: deque[dict[str, Any]] = deque(maxlen=LATEST_EVENTS)
        with open(file, "rb") as lines:
            for line in lines_of(lines):
                try:
                    event = json.loads(line.strip().rstrip(b",").removeprefix(b"[").removesuffix(b"]") or b"{}")
                except ValueError:  # truncated by a kill, or being written
                    continue
                if event.get("ph") == "M":
                    roles[event["tid"]] = event["args"]["name"]
                elif event.get("ph") == "X":
                    role = roles.get(event["tid"], "?")
                    start_s, length_s = event["ts"] / 1e6, event["dur"] / 1e6
                    calls.append({"role": role, "verb": event["name"], "start_s": start_s, "length_s": length_s})
        return list(calls)

    def _records(self, file: Path) -> list[dict[str, Any]]:
        state = file.stat()
        if not stat.S_ISREG(state.st_mode):  # reading a pipe would wait for its writer
            raise Refusal(f"{file} is no regular file")
        version = (state.st_mtime_ns, state.st_size)
        if self._metrics.get(file, (None,))[0] != version:
            self._metrics[file] = (version, list(read_records(file)))
        return self._metrics[file][1]

    def _index(self, run: str, kind: str) -> "StepIndex":
        if kind not in SAMPLE_FILES:
            raise FileNotFoundError(kind)
        file = self._file(run, SAMPLE_FILES[kind])
        return self._indices.setdefault(file, StepIndex(file))

    def _file(self, run: str, name: str) -> Path:
        file = _target(self._folder(run) / name)
        if not file.is_relative_to(self.root) or not file.is_file():
            raise FileNotFoundError(f"{run}/{name}")
        return file

    def _folder(self, run: str) -> Path:
        folder = _target(self.root / run)
        if not folder.is_relative_to(self.root) or not folder.is_dir():
            raise FileNotFoundError(run)
        return folder


class StepIndex:
    """Offsets of the steps in a file of samples, so that one step of a large file can be read alone.

    Every call indexes the lines that were added. A file that a resumed run truncated is indexed again.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._starts: dict[int, int] = {}
        self._end = 0
        self._last_line = b""
        self._lock = threading.Lock()  # requests come in several threads

    def sizes(self) -> dict[int, int]:
        """Return the size of each step in bytes."""
        return {step: end - start for step, (start, end) in self._ranges().items()}

    def read(self, step: int) -> list[dict[str, Any]]:
        """Return the records of a step."""
        start, end = self._ranges().get(step, (0, 0))
        with open(self._file, "rb") as file:
            file.seek(start)
            records = map(_record, file.read(end - start).splitlines())
            return [record for record in records if record is not None]

    def _ranges(self) -> dict[int, tuple[int, int]]:
        """Return the offsets of the start and the end of each step."""
        with self._lock:
            self._update()
            offsets = [*self._starts.values(), self._end]
            return dict(zip(self._starts, pairwise(offsets), strict=True))

    def _update(self) -> None:
        with open(self._file, "rb") as file:
            file.seek(max(self._end - len(self._last_line), 0))
            if file.read(len(self._last_line)) != self._last_line:  # truncated by a resumed run
                self._starts, self._end, self._last_line = {}, 0, b""
                file.seek(0)
            for line in lines_of(file):
                if not line.endswith(b"\n"):  # being written
                    break
                found = _STEP.match(line)
                record = {"step": int(found[1])} if found else _record(line)
                if record is not None:  # a damaged line belongs to the step before
                    self._starts.setdefault(record["step"], self._end)
                self._end += len(line)
                self._last_line = line


def _target(path: Path) -> Path:
    """Return the file that a path leads to, without links; it may be missing.

    Raises:
      Refusal: A link leads to itself.
    """
    target = os.path.realpath(path)
    if os.path.islink(target):
        raise Refusal(f"{path} is a link that leads to itself, expected a file; remove the link")
    return Path(target)


def _record(line: bytes) -> dict[str, Any] | None:
    """Return the record of a line; None for a damaged line."""
    try:
        record = json.loads(line)
        return record if isinstance(record["step"], int) else None
    except (ValueError, TypeError, KeyError, RecursionError):
        return None


def _flat(settings: Any, prefix: str = "") -> list[tuple[str, Any]]:
    """Return every setting with its dotted name."""
    if isinstance(settings, dict):
        items = list(settings.items())
    elif isinstance(settings, list) and any(isinstance(item, dict) for item in settings):
        items = list(enumerate(settings))
    else:
        return [(prefix.removesuffix("."), settings)]
    return [pair for name, value in items for pair in _flat(value, f"{prefix}{name}.")]
