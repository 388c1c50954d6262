"""Records of JSON lines, JSON and parquet; what is wrong is said with file, line and key."""

import codecs
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from decimal import Decimal
from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from jaxrlhf.config import Refusal
from jaxrlhf.data.files.lines import lines_of

RECORDS = re.compile(r"\.(?:(?:jsonl|ndjson|json)(?:\.gz|\.bz2|\.xz|\.zst)?|parquet)$")
"""Names of files with records."""

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
      narrow: Floats of fewer than 64 bits that the file has, `float16` or `float32`, by the name of their field.
    """

    place: str
    record: dict[str, Any]
    stored: Stored
    source: str = ""
    narrow: Mapping[str, str] = MappingProxyType({})

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
                if (kind := self.narrow.get(key)) is not None:
                    return np.format_float_positional(np.dtype(kind).type(value), trim="0")
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
      Refusal: missing or empty file, one of another kind than `RECORDS` names, or a record that is not a JSON object.
    """
    path = Path(path)
    if RECORDS.search(path.name) is None:
        raise Refusal(
            f"{path}: expected a .jsonl or .ndjson (one JSON object a line), .json or .parquet file, or one of JSON as "
            f".gz, .bz2, .xz or .zst{_advice(path)}"
        )
    if not path.is_file():
        close = get_close_matches(path.name, [one.name for one in path.parent.glob("*.*")], n=1)
        hint = f"; did you mean {path.with_name(close[0])}?" if close else f" (looked from {Path.cwd()})"
        raise Refusal(f"{path}: no such file{hint}")
    empty = True
    for row in (_read_parquet if path.suffix == ".parquet" else _read_json)(path):
        empty = False
        yield row
    if empty:
        raise Refusal(f"{path}: the file holds no records")


def _advice(path: Path) -> str:
    """Advice on a file of another kind: what makes one of it that is read."""
    if path.suffix in (".csv", ".tsv", ".xlsx"):
        kind = "excel" if path.suffix == ".xlsx" else "csv"
        more = ", sep='\\t'" if path.suffix == ".tsv" else ""
        return f"; pandas.read_{kind}({path.name!r}{more}).to_parquet({path.with_suffix('.parquet').name!r}) makes one"
    if path.suffix == ".zip":
        return f"; unpack it first, such as by unzip {path.name}"
    if path.is_dir():
        names = [one.name for one in path.iterdir()]
        return arrow_advice(path, names) or "; HubData reads a directory laid out like a data set of the hub"
    return ""


def arrow_advice(folder: str | Path, names: Iterable[str]) -> str:
    """Advice on a folder that `datasets` saved to disk; empty for another one."""
    files = {Path(name).name for name in names}
    split = "['train']" if "dataset_dict.json" in files else ""
    if not split and not any(name.endswith(".arrow") for name in files):
        return ""
    return (
        f"; it is what save_to_disk of datasets writes: datasets.load_from_disk({str(folder)!r}){split}"
        ".to_parquet('train.parquet') makes a file"
    )


def _read_json(path: Path) -> Iterator[Row]:
    """Rows of JSON lines, or of one list of objects in a `.json` file."""
    if not _is_list(path):
        yield from _read_jsonl(path)
        return
    for number, record in enumerate(_listed(path), start=1):
        place = f"{path}, record {number}"
        _check_record(record, place)
        yield Row(place, record, json.dumps(record).encode(), f"{path.absolute()}#{number}")


def _is_list(path: Path) -> bool:
    """True if a file named `.json` is one list, which may stand on several lines."""
    if not re.search(r"\.json(\.|$)", path.name):
        return False
    lines = (line.removeprefix(codecs.BOM_UTF8).strip() for line in lines_of(path))
    first = next((line for line in lines if line), b"")
    return first.startswith(b"[")


def _listed(path: Path) -> list[Any]:
    try:
        found: list[Any] = json.loads(b"".join(lines_of(path)))
    except (ValueError, RecursionError) as error:
        raise Refusal(f"{path}: not valid JSON ({error}); expected a list of objects, or one object a line") from error
    return found


def _check_record(record: Any, place: str) -> None:
    if _deeper(record, _DEEPEST):
        raise Refusal(f"{place}: lists or objects are nested more than {_DEEPEST} deep; flatten the record")
    if not isinstance(record, dict):
        raise Refusal(f"{place}: expected a JSON object, got {type(record).__name__}")


def _read_jsonl(path: Path) -> Iterator[Row]:
    for number, line in enumerate(lines_of(path), start=1):
        if not line.strip():
            continue
        place = f"{path}, line {number}"
        try:
            record: Any = json.loads(line)
        except ValueError as error:  # not JSON, or not UTF-8
            if line[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
                raise Refusal(f"{path}: the file is UTF-16; save it as UTF-8") from error
            raise Refusal(f"{place}: not valid JSON ({error}); each line holds one object") from error
        except RecursionError as error:
            raise Refusal(
                f"{place}: lists or objects are nested more than {_DEEPEST} deep; flatten the record"
            ) from error
        _check_record(record, place)
        yield Row(place, record, line.strip(), f"{path.absolute()}#{number}")


def _deeper(value: Any, deepest: int) -> bool:
    """True if lists or objects are nested more than so many deep."""
    level = [value]
    for _ in range(deepest):
        level = [inner for outer in level if isinstance(outer, dict | list) for inner in _inside(outer)]
    return any(isinstance(inner, dict | list) for inner in level)


def _inside(outer: dict[str, Any] | list[Any]) -> Iterable[Any]:
    return outer.values() if isinstance(outer, dict) else outer


def _read_parquet(path: Path) -> Iterator[Row]:
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:  # a part of it at a time is in memory
            narrow = dict(_narrow(file.schema_arrow))
            for batch in file.iter_batches(batch_size=1024):
                for record in _whole_microseconds(pyarrow.Table.from_batches([batch])).to_pylist():
                    number += 1
                    yield Row(f"{path}, row {number}", record, record, f"{path.absolute()}#{number}", narrow)
    except (pyarrow.ArrowException, OSError) as error:
        raise Refusal(f"{path}: not a readable parquet file ({error})") from error


def _narrow(fields: Any, outer: str = "") -> Iterator[tuple[str, str]]:
    """Names of fields with floats of fewer than 64 bits, `a.b` being `b` of `a`, and what they are."""
    import pyarrow

    for field in fields:
        if pyarrow.types.is_float16(field.type) or pyarrow.types.is_float32(field.type):
            yield outer + field.name, "float16" if pyarrow.types.is_float16(field.type) else "float32"
        elif pyarrow.types.is_struct(field.type):
            yield from _narrow(field.type, f"{outer}{field.name}.")


def _whole_microseconds(table: Any) -> Any:
    """A table of pyarrow whose times are whole microseconds, as Python has them, cut where they are nanoseconds."""
    import pyarrow

    schema = pyarrow.schema([field.with_type(_in_microseconds(field.type)) for field in table.schema])
    return table if schema == table.schema else table.cast(schema, safe=False)


def _in_microseconds(kind: Any) -> Any:
    import pyarrow
    from pyarrow import types

    if getattr(kind, "unit", None) == "ns":
        if types.is_timestamp(kind):
            return pyarrow.timestamp("us", kind.tz)
        return pyarrow.time64("us") if types.is_time(kind) else pyarrow.duration("us")
    if types.is_struct(kind):
        return pyarrow.struct([field.with_type(_in_microseconds(field.type)) for field in kind])
    if types.is_list(kind):
        return pyarrow.list_(kind.value_field.with_type(_in_microseconds(kind.value_type)))
    return kind


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

        table = _whole_microseconds(pyarrow.parquet.read_table(path, memory_map=True))
        return lambda index: dict(table.slice(index, 1).to_pylist()[0])
    if _is_list(Path(path)):
        return _listed(Path(path)).__getitem__
    lines = [*lines_of(Path(path))]
    return lambda index: dict(json.loads(lines[index]))
