"""Records of `.jsonl`, `.jsonl.gz` and `.parquet` files; what is wrong is said with file, line and key."""

import codecs
import gzip
import json
import math
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from decimal import Decimal
from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from jaxrlhf.config import Refusal

_DEEPEST = 64
"""Lists and objects within each other; Python's parser, which reads a record again in every step, ends somewhere."""

Stored = Mapping[str, Any] | bytes
"""A record as it is kept: the JSON text of its line, which takes less memory than its objects, or the objects."""

Messages = list[dict[str, Any]]
"""Chat messages, each with the texts `role` and `content`."""


def restored(record: Stored) -> Mapping[str, Any]:
    """The objects of a kept record."""
    return json.loads(record) if isinstance(record, bytes) else record


_NONE = object()


def field_of(record: Mapping[str, Any], key: str) -> Any:
    """The field `key`; or, where it is `a.b` and there is none, field `b` of field `a`; `_NONE` if there is neither."""
    if key in record:
        return record[key]
    outer, dot, inner = key.partition(".")
    below = record.get(outer)
    return field_of(below, inner) if dot and isinstance(below, Mapping) else _NONE


def without_field(record: Mapping[str, Any], key: str) -> dict[str, Any]:
    """The record without the field that `field_of` finds."""
    outer, _, inner = key.partition(".")
    if key in record or not isinstance(record.get(outer), Mapping):
        return {name: value for name, value in record.items() if name != key}
    return {**record, outer: without_field(record[outer], inner)}


class Row(NamedTuple):
    """A record and where it stands, such as `train.jsonl, line 3`.

    Attributes:
      stored: Form in which the record is kept.
      source: File and number of the record, as `record_at` takes them.
    """

    place: str
    record: dict[str, Any]
    stored: Stored
    source: str = ""

    def has(self, key: str) -> bool:
        """True if the record has the field `key`."""
        return field_of(self.record, key) is not _NONE

    def value(self, key: str, setting: str | None = None) -> Any:
        """The field `key`, `a.b` being `b` of `a`; `Refusal` if the record has none.

        Args:
          setting: Setting that names the field, for the refusal.
        """
        value = field_of(self.record, key)
        if value is _NONE:
            advice = f"; name the right one by {setting}" if setting else ""
            raise Refusal(f"{self.place}: no key {key!r}; there are {sorted(self.record)}{advice}")
        return value

    def text(self, key: str, setting: str | None = None, advice: str = "") -> str:
        """The field `key` as text; numbers become text, without an exponent; else a `Refusal` with some advice."""
        value = self.value(key, setting)
        match value:
            case str():
                return value
            case float() | Decimal() if math.isfinite(value):
                return f"{Decimal(str(value)):f}"
            case int() if not isinstance(value, bool):
                return str(value)
        raise Refusal(f"{self.place}: {key!r} must be a text or a number, got {value!r:.80}{advice}")


class PairPart(NamedTuple):
    """The rejected answer of a pair, and what is known of both.

    Attributes:
      margin: Least difference of the scores.
      safe: Whether chosen and rejected are harmless; None if that is not known.
    """

    rejected: str | Messages
    margin: float
    safe: tuple[bool, bool] | None


class StepPart(NamedTuple):
    """A solution whose steps are labelled.

    Attributes:
      steps: Texts of the steps, without separators.
      labels: Whether each step is right.
      separator: Text after each step, the last one too.
    """

    steps: tuple[str, ...]
    labels: tuple[bool, ...]
    separator: str


class SourceRecord(NamedTuple):
    """A record whose parts are known, not yet tokenised.

    Attributes:
      place: Where it comes from, for error messages.
      prompt: A user's text, or chat messages.
      answer: Reference answer for the rewards.
      solution: Worked solution for supervised training: a text, or messages of several turns.
      record: The source record, as it is kept.
      pair: The rest of the pair whose chosen answer is `solution`; None if the record is none.
      images: References to images, of which each has a `MARK` in the prompt.
      steps: The labelled steps of its solution, which is then None; None if they are not.
      further: Other worked solutions.
    """

    place: str
    prompt: str | Messages
    answer: str | None
    solution: str | Messages | None
    record: Stored
    pair: PairPart | None = None
    images: tuple[str, ...] = ()
    steps: StepPart | None = None
    further: tuple[str, ...] = ()

    @property
    def answer_texts(self) -> list[str]:
        """Texts of all answers."""
        return [
            *(texts_of(self.solution) if self.solution else []),
            *(texts_of(self.pair.rejected) if self.pair else []),
            *(self.steps.steps if self.steps else ()),
            *self.further,
        ]


def texts_of(said: str | Messages) -> list[str]:
    """Texts of a prompt or an answer."""
    return [said] if isinstance(said, str) else [str(message.get("content") or "") for message in said]


def read_rows(path: str | Path) -> Iterator[Row]:
    """The records of a file, one after another.

    Raises:
      Refusal: missing or empty file, a suffix other than `.jsonl`, `.jsonl.gz` and `.parquet`, or a
        line that is not a JSON object.
    """
    path = Path(path)
    readers = {".jsonl": _read_jsonl, ".jsonl.gz": _read_jsonl, ".parquet": _read_parquet}
    suffix = next((suffix for suffix in readers if path.name.endswith(suffix)), None)
    if suffix is None:
        raise Refusal(f"{path}: expected a .jsonl (one JSON object a line), .jsonl.gz or .parquet file{_advice(path)}")
    if not path.is_file():
        close = get_close_matches(path.name, [one.name for one in path.parent.glob("*.*")], n=1)
        hint = f"; did you mean {path.with_name(close[0])}?" if close else f" (looked from {Path.cwd()})"
        raise Refusal(f"{path}: no such file{hint}")
    empty = True
    for row in readers[suffix](path):
        empty = False
        yield row
    if empty:
        raise Refusal(f"{path}: the file holds no records")


def _advice(path: Path) -> str:
    """Advice on a file of another kind: what makes one of it that is read."""
    if path.suffix in (".csv", ".tsv", ".json", ".xlsx"):
        kind = {".csv": "csv", ".tsv": "csv", ".json": "json", ".xlsx": "excel"}[path.suffix]
        more = ", sep='\\t'" if path.suffix == ".tsv" else ""
        return f"; pandas.read_{kind}({path.name!r}{more}).to_parquet({path.with_suffix('.parquet').name!r}) makes one"
    return "; HubData reads a directory laid out like a data set of the hub" if path.is_dir() else ""


def _read_jsonl(path: Path) -> Iterator[Row]:
    for number, line in enumerate(_lines(path), start=1):
        if not line.strip():
            continue
        place = f"{path}, line {number}"
        try:
            record: Any = json.loads(line)
        except ValueError as error:  # not JSON, or not UTF-8
            if line[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
                raise Refusal(f"{path}: the file is UTF-16; save it as UTF-8") from error
            raise Refusal(f"{place}: not valid JSON ({error}); each line holds one object") from error
        except RecursionError:
            record = None
        if record is None or _deeper(record, _DEEPEST):
            raise Refusal(f"{place}: lists or objects are nested more than {_DEEPEST} deep; flatten the record")
        if not isinstance(record, dict):
            raise Refusal(f"{place}: expected a JSON object, got {type(record).__name__}")
        yield Row(place, record, line.strip(), f"{path.absolute()}#{number}")


def _deeper(value: Any, deepest: int) -> bool:
    """True if lists or objects are nested more than so many deep."""
    level = [value]
    for _ in range(deepest):
        level = [inner for outer in level if isinstance(outer, dict | list) for inner in _inside(outer)]
    return any(isinstance(inner, dict | list) for inner in level)


def _inside(outer: dict[str, Any] | list[Any]) -> Iterable[Any]:
    return outer.values() if isinstance(outer, dict) else outer


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


def _read_parquet(path: Path) -> Iterator[Row]:
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:  # a part of it at a time is in memory
            for batch in file.iter_batches(batch_size=1024):
                for record in batch.to_pylist():
                    number += 1
                    yield Row(f"{path}, row {number}", record, record, f"{path.absolute()}#{number}")
    except (pyarrow.ArrowException, OSError) as error:
        raise Refusal(f"{path}: not a readable parquet file ({error})") from error


def record_at(path: str, number: int) -> Mapping[str, Any]:
    """The record with a number, from 1, of a file that was read before."""
    try:
        state = os.stat(path)
        return _numbered(path, state.st_mtime_ns, state.st_size, state.st_ino)(number - 1)
    except (FileNotFoundError, IndexError) as error:
        raise Refusal(
            f"{path}: record {number} is not there any more; the file has changed, so read it again"
        ) from error


@lru_cache(maxsize=4)
def _numbered(path: str, *_: int) -> Callable[[int], Mapping[str, Any]]:
    """Function of an index to the record there, which is made when it is asked for, of one state of a file."""
    if path.endswith(".parquet"):
        import pyarrow.parquet

        table = pyarrow.parquet.read_table(path, memory_map=True)
        return lambda index: dict(table.slice(index, 1).to_pylist()[0])
    lines = [*_lines(Path(path))]
    return lambda index: dict(json.loads(lines[index]))
