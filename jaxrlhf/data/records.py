"""Readers of JSON-lines, JSON, CSV, parquet and Arrow files; errors name the file, the line and the key.

The package `datasets` (5.2) does not read JSON and CSV here: its errors name no line, a record gets the keys of all
records, texts of times become times, and the answer `007` of a CSV file becomes 7.0.
"""

import codecs
import csv
import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal
from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from jaxrlhf.config import Refusal
from jaxrlhf.data.files.lines import LONGEST_LINE, content_of, lines_of, starts_as_list
from jaxrlhf.data.files.tables import TABLES, narrow_fields, opened, whole_microseconds

RECORDS = re.compile(r"\.(?:(?:jsonl|ndjson|json|csv|tsv)(?:\.gz|\.bz2|\.xz|\.zst)?|parquet|arrow)$")
"""Pattern of the names of record files."""

_DEEPEST = 64
"""Maximum nesting depth of lists and objects, because Python parses a record recursively in every step."""

_TOO_DEEP = f"lists or objects are nested more than {_DEEPEST} deep; flatten the record"

Stored = Mapping[str, Any] | bytes
"""Stored form of a record: the JSON text of its line, which takes less memory than parsed objects, or the objects."""

Messages = list[dict[str, Any]]
"""Chat messages, each with the texts `role` and `content`."""


def restored(record: Stored) -> Mapping[str, Any]:
    """Return the parsed fields of a stored record."""
    return json.loads(record) if isinstance(record, bytes) else record


_NONE = object()  # result of `field_of` if there is no field


def field_of(record: Mapping[str, Any], key: str) -> Any:
    """Return field `key`; if it is missing, `a.b` reads field `b` of field `a`. Return `_NONE` if both are missing."""
    if key in record:
        return record[key]
    outer, dot, inner = key.partition(".")
    below = record.get(outer)
    return field_of(below, inner) if dot and isinstance(below, Mapping) else _NONE


def without_field(record: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Return the record without the field that `field_of` finds."""
    outer, _, inner = key.partition(".")
    if key in record or not isinstance(record.get(outer), Mapping):
        return {name: value for name, value in record.items() if name != key}
    return {**record, outer: without_field(record[outer], inner)}


class Row(NamedTuple):
    """Record with its place for error messages, such as `train.jsonl, line 3`.

    Attributes:
      stored: Record in its stored form.
      source: File and number of the record for `record_at`, as `PATH#NUMBER`; empty without a file.
      narrow: Type of each field with floats of fewer than 64 bits, `float16` or `float32`, by field name.
    """

    place: str
    record: dict[str, Any]
    stored: Stored
    source: str = ""
    narrow: Mapping[str, str] = MappingProxyType({})

    def has(self, key: str) -> bool:
        """Return True if the record has the field `key`."""
        return field_of(self.record, key) is not _NONE

    def value(self, key: str, setting: str | None = None) -> Any:
        """Return field `key`, where `a.b` reads field `b` of field `a`. Raise `Refusal` if it is missing.

        Args:
          setting: Setting that names the field, for the error message.
        """
        value = field_of(self.record, key)
        if value is _NONE:
            advice = f"; name the right one by {setting}" if setting else ""
            raise Refusal(f"{self.place}: no key {key!r}; there are {sorted(self.record)}{advice}")
        return value

    def text(self, key: str, setting: str | None = None, advice: str = "") -> str:
        """Return field `key` as text, numbers without an exponent. Raise `Refusal` with `advice` for other types."""
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
    """Rejected answer of a preference pair, and labels of both answers.

    Attributes:
      margin: Minimum difference between the scores of the two answers.
      safe: (chosen, rejected), each True if the answer is harmless; None if unknown.
    """

    rejected: str | Messages
    margin: float
    safe: tuple[bool, bool] | None


class StepPart(NamedTuple):
    """Solution whose steps are labeled.

    Attributes:
      steps: Texts of the steps, without separators.
      labels: True for each step that is right.
      separator: Text after each step, including the last.
    """

    steps: tuple[str, ...]
    labels: tuple[bool, ...]
    separator: str


class SourceRecord(NamedTuple):
    """Record split into prompt, answer and solution, not yet tokenized.

    Attributes:
      place: Origin of the record, for error messages.
      prompt: User's text, or chat messages.
      answer: Reference answer for the rewards.
      solution: Worked solution for supervised training: a text, or messages of several turns.
      record: Source record in its stored form.
      pair: Rejected answer and labels of a preference pair whose chosen answer is `solution`; None if it is no pair.
      images: References to images; the prompt has one `MARK` for each.
      steps: Labeled steps of the solution (`solution` is then None); None without labels.
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
    def text_answers(self) -> list[str]:
        """Answers that are texts: the solution, the rejected answer, and further solutions."""
        answers = [self.solution, self.pair.rejected if self.pair else None, *self.further]
        return [answer for answer in answers if isinstance(answer, str)]

    @property
    def answer_texts(self) -> list[str]:
        """Texts of all answers, steps and messages included."""
        messages = [self.solution, self.pair.rejected if self.pair else None]
        texts = [text for answer in messages if isinstance(answer, list) for text in texts_of(answer)]
        return [*texts, *self.text_answers, *(self.steps.steps if self.steps else ())]


def texts_of(turns: str | Messages) -> list[str]:
    """Return the texts of a prompt or an answer."""
    return [turns] if isinstance(turns, str) else [str(message.get("content") or "") for message in turns]


def with_texts(prompt: str | Messages, change: Callable[[str], str]) -> str | Messages:
    """Return a prompt with `change` applied to each of its texts."""
    if isinstance(prompt, str):
        return change(prompt)
    return [{**message, "content": change(message["content"])} for message in prompt]


def read_rows(path: str | Path) -> Iterator[Row]:
    """Yield the records of a file, in order.

    Raises:
      Refusal: The file is missing, empty or not named as in `RECORDS`, or a record is not a JSON object.
    """
    path = Path(path)
    if RECORDS.search(path.name) is None:
        raise Refusal(
            f"{path}: expected a .jsonl or .ndjson (one JSON object a line), .json, .csv, .tsv, .parquet or .arrow "
            f"file, or a compressed text file (.gz, .bz2, .xz or .zst){_advice(path)}"
        )
    if not path.is_file():
        close = get_close_matches(path.name, [one.name for one in path.parent.glob("*.*")], n=1)
        hint = f"; did you mean {path.with_name(close[0])}?" if close else f" (relative to {Path.cwd()})"
        raise Refusal(f"{path}: no such file{hint}")
    row: Row | None = None
    for row in _rows(path):
        yield row
    if row is None:
        raise Refusal(f"{path}: the file holds no records")


def _rows(path: Path) -> Iterator[Row]:
    if path.suffix in TABLES:
        return _read_table(path)
    return _read_csv(path) if _delimiter(path.name) else _read_json(path)


def _advice(path: Path) -> str:
    """Return advice on how to convert a file of an unsupported kind; empty if there is none."""
    if path.suffix == ".xlsx":
        return f"; pandas.read_excel({path.name!r}).to_parquet({path.with_suffix('.parquet').name!r}) makes one"
    if path.suffix == ".zip":
        return f"; unpack it first, for example by unzip {path.name}"
    if path.is_dir():
        if (path / "dataset_dict.json").is_file():
            return f"; it has the splits that save_to_disk of datasets wrote: name one, such as {path / 'train'}"
        return "; HubData reads a directory with the layout of a hub data set"
    return ""


def _read_json(path: Path) -> Iterator[Row]:
    """Yield the rows of JSON lines, or of a `.json` file that holds one list of objects."""
    if not _is_list(path):
        yield from _read_jsonl(path)
        return
    try:
        records: list[Any] = json.loads(content_of(path))
    except (ValueError, RecursionError) as error:
        raise Refusal(f"{path}: not valid JSON ({error}); expected a list of objects, or one object a line") from error
    for number, record in enumerate(records, start=1):
        place = f"{path}, record {number}"
        _check_record(record, place)
        yield Row(place, record, json.dumps(record).encode(), f"{path.absolute()}#{number}")


def _delimiter(name: str) -> str | None:
    """Return the character between the cells of a CSV file; None for other files."""
    found = re.search(r"\.(csv|tsv)(\.|$)", name)
    return {"csv": ",", "tsv": "\t"}[found[1]] if found else None


def _read_csv(path: Path) -> Iterator[Row]:
    """Yield the rows of a CSV file, whose first line names the columns; cells are texts."""
    csv.field_size_limit(LONGEST_LINE)
    # The mark of a file's encoding, before a quote, would make the quote a part of the first name.
    lines = (line.decode("utf-8" if number else "utf-8-sig") for number, line in enumerate(lines_of(path)))
    reader = csv.reader(lines, delimiter=_delimiter(path.name) or ",", strict=True)
    try:
        names = next(reader, [])
        if len({*names, ""}) <= len(names):
            raise Refusal(f"{path}: the first line must name each column once, got {names!r:.80}")
        for number, cells in enumerate(filter(None, reader), start=1):
            place = f"{path}, line {reader.line_num}"
            if len(cells) != len(names):
                raise Refusal(f"{place}: {len(cells)} cells, and the first line names {names!r:.80}")
            record = dict(zip(names, cells, strict=True))
            yield Row(place, record, json.dumps(record).encode(), f"{path.absolute()}#{number}")
    except (csv.Error, UnicodeDecodeError) as error:
        raise Refusal(f"{path}, line {reader.line_num}: not valid CSV ({error}); save it as UTF-8") from error


def _is_list(path: Path) -> bool:
    """Return True if a `.json` file holds one list, possibly over several lines."""
    return bool(re.search(r"\.json(\.|$)", path.name)) and starts_as_list(path)


def _check_record(record: Any, place: str) -> None:
    if _deeper(record, _DEEPEST):
        raise Refusal(f"{place}: {_TOO_DEEP}")
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
            raise Refusal(f"{place}: {_TOO_DEEP}") from error
        _check_record(record, place)
        yield Row(place, record, line.strip(), f"{path.absolute()}#{number}")


def _deeper(value: Any, deepest: int) -> bool:
    """Return True if lists or objects are nested more than `deepest` levels deep."""
    if not isinstance(value, dict | list):
        return False
    inner = value.values() if isinstance(value, dict) else value
    return deepest == 0 or any(_deeper(one, deepest - 1) for one in inner)


def _read_table(path: Path) -> Iterator[Row]:
    import pyarrow

    number = 0
    try:
        with opened(path) as (schema, batches):  # only one batch of rows at a time is in memory
            narrow = dict(narrow_fields(schema))
            for batch in batches:
                for record in whole_microseconds(pyarrow.Table.from_batches([batch])).to_pylist():
                    number += 1
                    yield Row(f"{path}, row {number}", record, record, f"{path.absolute()}#{number}", narrow)
    except (pyarrow.ArrowException, OSError) as error:
        raise Refusal(f"{path}: not a readable {path.suffix[1:]} file ({error})") from error


def record_at(path: str, number: int) -> Mapping[str, Any]:
    """Return record `number` (of JSON lines: line `number`), counted from 1, of a file that was read before."""
    try:
        state = os.stat(path)
        return _numbered(path, state.st_mtime_ns, state.st_size, state.st_ino)(number)
    except (FileNotFoundError, LookupError) as error:
        raise Refusal(
            f"{path}: there is no record {number} any more; the file has changed, so read the data again"
        ) from error


@lru_cache(maxsize=4)
def _numbered(path: str, *_: int) -> Callable[[int], Mapping[str, Any]]:
    """Return a function from number to record, parsed on demand; other arguments are the file's state, as cache key."""
    if Path(path).suffix in TABLES:
        import pyarrow

        with opened(Path(path)) as (schema, batches):
            table = whole_microseconds(pyarrow.Table.from_batches(batches, schema))
        return lambda number: dict(table.slice(number - 1, 1).to_pylist()[0])
    stored = {int(row.source.rpartition("#")[2]): row.stored for row in _rows(Path(path))}
    return lambda number: restored(stored[number])
