"""Files of JSON objects, one per line in the order of their `step`, which survive kills and resumed runs."""

import json
import math
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from jaxrlhf.config import Refusal

LONGEST_LINE = 1 << 28
"""Largest size in bytes of a line. A file of a few bytes on disk may claim to hold an endless line of zeros."""


class RecordFile:
    """File to which records are appended; records survive a kill as soon as `append` returns.

    Args:
      resumed_step: Step after which an existing file is continued: later records, and a last line truncated by a kill,
        are removed. None starts a new file.

    Raises:
      Refusal: The file to continue has other content, or a line that is longer than `LONGEST_LINE`.
    """

    def __init__(self, path: Path, *, resumed_step: int | None = None) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._last_step = -math.inf if resumed_step is None else resumed_step
        end = 0 if resumed_step is None or not path.exists() else _end_of_step(path, resumed_step)
        self._file: BinaryIO = open(path, "ab")  # noqa: SIM115  open until close()
        self._file.truncate(end)

    def append(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Write records in the order of their `step`; numbers that are not finite become null."""
        lines = []
        for record in records:
            if record["step"] < self._last_step:
                raise ValueError(
                    f"{self._path} is at step {self._last_step}, but got a record of step {record['step']}; expected "
                    "steps in ascending order, which resuming requires"
                )
            self._last_step = record["step"]
            # Half of a surrogate pair has no UTF-8; a backslash escape of it is still JSON.
            text = json.dumps(jsonable(record), ensure_ascii=False, allow_nan=False)
            lines.append(text.encode("utf-8", "backslashreplace") + b"\n")
        self._file.write(b"".join(lines))
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def write_json(path: Path, content: Any) -> None:
    """Write a JSON file; after a kill or on a full disk, the previous file is intact."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(content, indent=2) + "\n")
    temporary.replace(path)


def read_records(path: Path | str) -> Iterator[dict[str, Any]]:
    """Yield the records of a file, without a last line that was truncated by a kill, and without damaged lines.

    Raises:
      Refusal: The first line is no JSON object with a `step`, or a line is longer than `LONGEST_LINE`.
    """
    return (record for record, _ in _scan(Path(path)))


def lines_of(file: BinaryIO) -> Iterator[bytes]:
    """Yield the lines of an open file from its position on.

    Raises:
      Refusal: A line is longer than `LONGEST_LINE`.
    """
    while line := file.readline(LONGEST_LINE + 1):
        if len(line) > LONGEST_LINE:
            raise Refusal(
                f"{file.name} has a line of more than {LONGEST_LINE} bytes, expected one JSON object a line; remove "
                "the line, or move the file away"
            )
        yield line


def jsonable(value: Any) -> Any:
    """Convert a value to JSON's types: NumPy scalars to Python's, numbers that are not finite to None."""
    if isinstance(value, Mapping):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(item) for item in value]
    if not isinstance(value, str) and hasattr(value, "item"):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _end_of_step(path: Path, step: int) -> int:
    """Return the offset in bytes after the last record up to `step`; one damaged `step` before it loses no record."""
    last, later = 0, 0
    for record, end in _scan(path):
        last, later = (end, 0) if record["step"] <= step else (last, later + 1)
        if later == 2:  # one may be damaged; lines after them are not read
            break
    return last


def _scan(path: Path) -> Iterator[tuple[dict[str, Any], int]]:
    """Yield records, each with the offset of its end; a damaged line among them is skipped with a warning."""
    end, found = 0, False
    with open(path, "rb") as file:
        for number, line in enumerate(lines_of(file), start=1):
            end += len(line)
            try:
                record = json.loads(line)
                if not math.isfinite(record["step"]):
                    raise ValueError("the step is not finite")
            except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
                if not file.peek(1) and not isinstance(error, RecursionError):  # the last line
                    return
                damage = f"{path}, line {number}, is not a JSON object with a 'step': {line[:60]!r}"
                if not found:  # maybe a file that no run wrote, which must not be continued
                    raise Refusal(
                        f"{damage}; if a run wrote the file, delete the line, else move the file to another folder"
                    ) from error
                warnings.warn(f"{damage}; skipping the line", stacklevel=2)
                continue
            if not line.endswith(b"\n"):  # without its line break, the next record would be on the same line
                return
            found = True
            yield record, end
