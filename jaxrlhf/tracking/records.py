"""Files of JSON objects, one a line and in the order of their `step`, that survive kills and resumes."""

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from jaxrlhf.config import Refusal


class RecordFile:
    """Appends records to a file; what was written when `append` returns survives a kill.

    Args:
      resumed_step: Go on with an existing file after this step: later records, and a last line
        torn by a kill, are cut off. None starts the file anew.

    Raises:
      ValueError: If the file to go on with holds something else.
    """

    def __init__(self, path: Path, *, resumed_step: int | None = None) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._last_step = -math.inf if resumed_step is None else resumed_step
        end = 0 if resumed_step is None or not path.exists() else _end_of_step(path, resumed_step)
        self._file: BinaryIO = open(path, "ab")  # noqa: SIM115  open until close()
        self._file.truncate(end)

    def append(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Write records, each with a `step` not below the ones before; numbers that are not finite become null."""
        lines = []
        for record in records:
            if record["step"] < self._last_step:
                raise ValueError(
                    f"{self._path} is at step {self._last_step} and was given one of step {record['step']}; "
                    f"steps must not go back, or a resumed run could not tell where to go on"
                )
            self._last_step = record["step"]
            # Half of a surrogate pair has no UTF-8; written as a backslash escape it is still JSON.
            text = json.dumps(jsonable(record), ensure_ascii=False, allow_nan=False)
            lines.append(text.encode("utf-8", "backslashreplace") + b"\n")
        self._file.write(b"".join(lines))
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def write_json(path: Path, content: Any) -> None:
    """Write a file of JSON; a kill or a full disk leaves that before it whole."""
    written = path.with_suffix(".tmp")
    written.write_text(json.dumps(content, indent=2) + "\n")
    written.replace(path)


def read_records(path: Path | str) -> Iterator[dict[str, Any]]:
    """The records of a file, without a last line that was torn by a kill.

    Raises:
      Refusal: If another line is no JSON object with a `step`.
    """
    return (record for record, _ in _scan(Path(path)))


def jsonable(value: Any) -> Any:
    """`value` in JSON's types: NumPy scalars as Python's, numbers that are not finite as None."""
    if isinstance(value, Mapping):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(item) for item in value]
    if not isinstance(value, str) and hasattr(value, "item"):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _end_of_step(path: Path, step: int) -> int:
    """Offset in bytes after the last record that is not beyond `step`."""
    end = 0
    for record, after in _scan(path):
        if record["step"] > step:
            break
        end = after
    return end


def _scan(path: Path) -> Iterator[tuple[dict[str, Any], int]]:
    """Records, each with the offset of its end."""
    end = 0
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            end += len(line)
            try:
                record = json.loads(line)
                record["step"]
            except (ValueError, TypeError, KeyError) as error:
                if not file.peek(1):  # the last line
                    return
                raise Refusal(f"{path}, line {number}, is not a JSON object with a 'step': {line[:60]!r}") from error
            if not line.endswith(b"\n"):  # complete but for the line break: the next record would join it
                return
            yield record, end
