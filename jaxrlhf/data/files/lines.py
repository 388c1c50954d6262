"""Lines of plain files, and of files compressed by gzip, bzip2, xz or Zstandard."""

import gzip
import io
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxrlhf.config import Refusal

COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
"""Suffixes of compressed files."""


def lines_of(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file, in order.

    Raises:
      Refusal: A compressed file is incomplete or damaged.
    """
    if path.suffix not in COMPRESSED:
        with path.open("rb") as file:
            yield from file
        return
    try:
        with _opened(path) as file:
            yield from file
    except Exception as error:
        # LZMAError cannot be imported if Python was built without lzma.
        if not isinstance(error, OSError | EOFError | zlib.error) and type(error).__name__ != "LZMAError":
            raise
        raise Refusal(
            f"{path}: incomplete or damaged {path.suffix} file ({error}); download or compress it again"
        ) from error


def _opened(path: Path) -> Any:
    """Open a compressed file, as a context manager."""
    if path.suffix == ".gz":
        return gzip.open(path)
    if path.suffix == ".zst":
        import pyarrow

        return io.BufferedReader(pyarrow.input_stream(str(path), compression="zstd"))
    if path.suffix == ".xz":
        import lzma

        return lzma.open(path)
    import bz2

    return bz2.open(path)
