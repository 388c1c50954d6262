"""Records of `.jsonl`, `.jsonl.gz` and `.parquet` files; what is wrong is said with file, line and key."""

import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from jaxrlhf.config import Refusal


class Row(NamedTuple):
    """A record and where it stands, such as `train.jsonl, line 3`."""

    place: str
    record: dict[str, Any]

    def value(self, key: str) -> Any:
        """The field `key`; `Refusal` if the record has none."""
        if key not in self.record:
            raise Refusal(f"{self.place}: no key {key!r}; there are {sorted(self.record)}")
        return self.record[key]

    def text(self, key: str) -> str:
        """The field `key` as text; numbers become text, anything else is a `Refusal`."""
        value = self.value(key)
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise Refusal(f"{self.place}: {key!r} must be a text or a number, got {value!r:.80}")
        return str(value)


def read_rows(path: str | Path) -> list[Row]:
    """All records of a file.

    Raises:
      Refusal: missing or empty file, a suffix other than `.jsonl`, `.jsonl.gz` and `.parquet`, or a
        line that is not a JSON object.
    """
    path = Path(path)
    readers = {".jsonl": _read_jsonl, ".jsonl.gz": _read_jsonl, ".parquet": _read_parquet}
    suffix = next((suffix for suffix in readers if path.name.endswith(suffix)), None)
    if suffix is None:
        raise Refusal(f"{path}: expected a .jsonl, .jsonl.gz or .parquet file")
    if not path.is_file():
        raise Refusal(f"{path}: no such file")
    rows = readers[suffix](path)
    if not rows:
        raise Refusal(f"{path}: the file holds no records")
    return rows


def _read_jsonl(path: Path) -> list[Row]:
    rows = []
    for number, line in enumerate(_lines(path), start=1):
        if not line.strip():
            continue
        place = f"{path}, line {number}"
        try:
            record = json.loads(line)
        except ValueError as error:  # not JSON, or not UTF-8
            raise Refusal(f"{place}: not valid JSON ({error}); each line holds one object") from error
        if not isinstance(record, dict):
            raise Refusal(f"{place}: expected a JSON object, got {type(record).__name__}")
        rows.append(Row(place, record))
    return rows


def _lines(path: Path) -> Iterator[bytes]:
    if path.suffix != ".gz":
        with path.open("rb") as file:
            yield from file
        return
    try:
        with gzip.open(path) as file:
            yield from file
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise Refusal(f"{path}: not a whole gzip file ({error})") from error


def _read_parquet(path: Path) -> list[Row]:
    import pyarrow
    import pyarrow.parquet

    try:
        records = pyarrow.parquet.read_table(path).to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise Refusal(f"{path}: not a readable parquet file ({error})") from error
    return [Row(f"{path}, row {number}", record) for number, record in enumerate(records, start=1)]
