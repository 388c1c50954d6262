"""Columns of byte strings or lists of token ids: in memory, or in a memory-mapped file."""

import io
from array import array
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import IO

import numpy as np

_ENDS = ".ends"


class Bytes:
    """Column of byte strings of any length, first appended one by one and then read in any order.

    Args:
      path: File of the values, next to a file with the end of each value; None keeps the values in memory.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._files = [_Appended(file) for file in (path, path and path.with_suffix(_ENDS))]
        self._count, self._end = 0, 0
        self._files[1].add((0).to_bytes(8, "little"))
        self._read: tuple[np.ndarray, np.ndarray] | None = None

    @classmethod
    def mapped(cls, path: Path) -> "Bytes":
        """Map the values that `seal` wrote to a file."""
        found = cls()
        values, ends = _map(path), _map(path.with_suffix(_ENDS)).view(np.int64)
        found._read, found._count = (values, ends), len(ends) - 1
        return found

    def append(self, value: bytes) -> None:
        """Add a value at the end."""
        self._count, self._end = self._count + 1, self._end + len(value)
        self._files[0].add(value)
        self._files[1].add(self._end.to_bytes(8, "little"))

    def seal(self) -> None:
        """End the writing; files are then memory-mapped, so that memory holds only the parts that are read."""
        if self._read is None:
            values, ends = (file.sealed() for file in self._files)
            self._read = values, ends.view(np.int64)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> bytes:
        values, ends = self.arrays
        return values[ends[index] : ends[index + 1]].tobytes()

    @property
    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """Bytes of all values, as uint8, and the end of each value, as int64 after a 0; no value can be added later."""
        self.seal()
        assert self._read is not None
        return self._read


class _Appended:
    """Bytes that are first appended and then read: in memory, or in a memory-mapped file."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._file: IO[bytes] = io.BytesIO() if path is None else path.open("w+b")
        self.add = self._file.write

    def __del__(self) -> None:
        """Close a file that was never sealed, for example because a later record could not be read."""
        if hasattr(self, "_file"):  # the file is missing if its folder was gone and opening it failed
            self._file.close()

    def sealed(self) -> np.ndarray:
        """End the writing and return all bytes, as uint8."""
        if self._path is None:
            assert isinstance(self._file, io.BytesIO)
            kept = self._file.getvalue()
            return np.frombuffer(kept, np.uint8) if kept else np.zeros(0, np.uint8)
        self._file.close()
        return _map(self._path)


class TokenLists:
    """Column of lists of token ids, as int32."""

    def __init__(self, column: Bytes) -> None:
        self._column = column

    def append(self, ids: Iterable[int]) -> None:
        """Add a list at the end."""
        self._column.append(array("i", ids).tobytes())

    def __getitem__(self, index: int) -> tuple[int, ...]:
        return tuple(array("i", self._column[index]))

    def feed(self, take: Callable[[memoryview], object]) -> None:
        """Pass the bytes of all lists to `take`, then the ends of the lists in tokens."""
        values, ends = self._column.arrays
        take(values.data)
        take((ends // 4).data)

    @property
    def lengths(self) -> np.ndarray:
        """Number of tokens of each list."""
        return np.diff(self._column.arrays[1]) // 4


def _map(path: Path) -> np.ndarray:
    """Map the bytes of a file; an empty file, which cannot be mapped, gives an empty array."""
    return np.memmap(path, np.uint8, "r") if path.stat().st_size else np.zeros(0, np.uint8)
