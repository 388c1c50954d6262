"""Batches of rows of parquet files and Arrow streams, with types that Python has."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

TABLES = (".parquet", ".arrow")
"""Suffixes of files with columns, whose batches pyarrow reads."""


@contextmanager
def opened(path: Path) -> Iterator[tuple[Any, Iterable[Any]]]:
    """Open a parquet file, or an Arrow stream as `save_to_disk` of `datasets` writes it, as its schema and batches."""
    import pyarrow
    import pyarrow.parquet

    if path.suffix == ".parquet":
        with pyarrow.parquet.ParquetFile(path) as file:
            yield file.schema_arrow, file.iter_batches(batch_size=1024)
        return
    with pyarrow.memory_map(str(path)) as mapped, pyarrow.ipc.open_stream(mapped) as stream:
        yield stream.schema, stream


def narrow_fields(fields: Any, outer: str = "") -> Iterator[tuple[str, str]]:
    """Yield name and type of each field with floats of fewer than 64 bits; `a.b` is field `b` of field `a`."""
    import pyarrow

    for field in fields:
        if pyarrow.types.is_float16(field.type) or pyarrow.types.is_float32(field.type):
            yield outer + field.name, "float16" if pyarrow.types.is_float16(field.type) else "float32"
        elif pyarrow.types.is_struct(field.type):
            yield from narrow_fields(field.type, f"{outer}{field.name}.")


def whole_microseconds(table: Any) -> Any:
    """Return a pyarrow table whose nanosecond times are truncated to microseconds, the resolution of Python's times."""
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
    if types.is_map(kind):
        key, item = _in_microseconds(kind.key_type), _in_microseconds(kind.item_type)
        return pyarrow.map_(key, kind.item_field.with_type(item))
    if types.is_fixed_size_list(kind):
        return pyarrow.list_(kind.value_field.with_type(_in_microseconds(kind.value_type)), kind.list_size)
    if types.is_list(kind) or types.is_large_list(kind):
        made = pyarrow.list_ if types.is_list(kind) else pyarrow.large_list
        return made(kind.value_field.with_type(_in_microseconds(kind.value_type)))
    return kind
