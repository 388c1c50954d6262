"""Columns of lists of bytes or token ids, one after another: in memory, or in a file that is mapped into memory."""

import io
from array import array
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import IO

import numpy as np

_ENDS = ".ends"


class Bytes:
    """Values of any length, first added one by one and then read in any order.

    Args:
      path: File to keep them in; None is memory.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path, self._ends = path, array("q", [0])
        self._file: IO[bytes] = io.BytesIO() if path is None else path.open("w+b")
        self._read: np.ndarray | None = None

    def __del__(self) -> None:
        """Close the file of values that were never sealed, as when a later record cannot be read."""
        if hasattr(self, "_file"):  # a folder that is gone has it opened nowhere
            self._file.close()

    @classmethod
    def mapped(cls, path: Path) -> "Bytes":
        """The values that `seal` has kept in a file."""
        found = cls()
        found._ends = array("q", path.with_suffix(_ENDS).read_bytes())
        found._read = _map(path)
        return found

    def append(self, value: bytes) -> None:
        """Add a value at the end."""
        self._file.write(value)
        self._ends.append(self._ends[-1] + len(value))

    def seal(self) -> None:
        """End the adding; a file is then mapped, so that memory holds what is read of it."""
        if self._read is not None:
            return
        if self._path is None:
            assert isinstance(self._file, io.BytesIO)
            kept = self._file.getvalue()
            self._read = np.frombuffer(kept, np.uint8) if kept else np.zeros(0, np.uint8)
            return
        self._path.with_suffix(_ENDS).write_bytes(self._ends.tobytes())
        self._file.close()
        self._read = _map(self._path)

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, index: int) -> bytes:
        self.seal()
        assert self._read is not None
        return self._read[self._ends[index] : self._ends[index + 1]].tobytes()

    @property
    def sizes(self) -> np.ndarray:
        """Bytes of each value."""
        return np.diff(np.frombuffer(self._ends, np.int64))

    def feed(self, take: Callable[[memoryview], object], *, unit: int) -> None:
        """Hand over the bytes of all values, and where they end in units of some bytes."""
        self.seal()
        assert self._read is not None
        take(self._read.data)
        take((np.frombuffer(self._ends, np.int64) // unit).data)


class TokenLists:
    """Lists of token ids, as int32."""

    def __init__(self, column: Bytes) -> None:
        self._column = column

    def append(self, ids: Iterable[int]) -> None:
        """Add a list at the end."""
        self._column.append(array("i", ids).tobytes())

    def __getitem__(self, index: int) -> tuple[int, ...]:
        return tuple(array("i", self._column[index]))

    def feed(self, take: Callable[[memoryview], object]) -> None:
        """Hand over the bytes of all lists."""
        self._column.feed(take, unit=4)

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each list."""
        return self._column.sizes // 4


def _map(path: Path) -> np.ndarray:
    """The bytes of a file; an empty one cannot be mapped."""
    return np.memmap(path, np.uint8, "r") if path.stat().st_size else np.zeros(0, np.uint8)
