"""Columns of token ids and of byte strings, in Arrow's format: in memory, or in a memory-mapped file."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.compute

TOKENS = pyarrow.list_(pyarrow.int32())
BYTES = pyarrow.large_binary()

_BATCH_ROWS = 1024


class Writer:
    """Writer of rows with columns, one row after another.

    Args:
      schema: Columns of type `TOKENS` or `BYTES`.
      path: File of the rows; None keeps the rows in memory.

    Attributes:
      count: Number of rows so far.
    """

    def __init__(self, schema: Any, path: Path | None = None) -> None:
        self._schema, self._path, self.count = schema, path, 0
        self._rows: list[dict[str, Any]] = []
        self._sink = pyarrow.BufferOutputStream() if path is None else pyarrow.OSFile(str(path), "wb")
        self._stream = pyarrow.ipc.new_stream(self._sink, schema)

    def append(self, **row: Any) -> None:
        """Add a row at the end; a column that is left out has no value."""
        self._rows.append(row)
        self.count += 1
        if len(self._rows) == _BATCH_ROWS:
            self._write()

    def _write(self) -> None:
        self._stream.write_batch(pyarrow.RecordBatch.from_pylist(self._rows, self._schema))
        self._rows = []

    def finished(self) -> Any:
        """End the writing and return the rows as a table of pyarrow."""
        self._write()
        self._stream.close()
        if self._path is None:
            return pyarrow.ipc.open_stream(self._sink.getvalue()).read_all()
        self._sink.close()
        return mapped(self._path)


def mapped(path: Path) -> Any:
    """Map the rows of a file as a table of pyarrow, so that memory holds only the parts that are read."""
    return pyarrow.ipc.open_stream(pyarrow.memory_map(str(path))).read_all()


class TokenColumn:
    """Column of lists of token ids; rows without a list count in neither lengths nor bytes."""

    def __init__(self, column: Any) -> None:
        self._column = column

    def __getitem__(self, index: int) -> tuple[int, ...]:
        return tuple(self._column[index].values.to_numpy().tolist())

    @property
    def lengths(self) -> np.ndarray:
        """Number of tokens of each list."""
        return pyarrow.compute.list_value_length(self._column.drop_null()).to_numpy().astype(np.int64)

    def feed(self, take: Callable[[memoryview], object]) -> None:
        """Pass the bytes of all lists to `take`, then the ends of the lists in tokens, after a 0."""
        for chunk in self._column.chunks:
            take(chunk.flatten().to_numpy().data)
        take(np.cumsum([0, *self.lengths], dtype=np.int64).data)
