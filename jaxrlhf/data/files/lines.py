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

LONGEST_LINE = 1 << 28
"""Largest size in bytes of a line of a compressed file; a small file may claim to hold a line of many gigabytes."""


def lines_of(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file, in order.

    Raises:
      Refusal: A compressed file is incomplete or damaged, or one of its lines is too long.
    """
    if path.suffix not in COMPRESSED:
        with path.open("rb") as file:
            yield from file
        return
    try:
        with _opened(path) as file:
            while line := file.readline(LONGEST_LINE + 1):
                if len(line) > LONGEST_LINE:
                    raise Refusal(
                        f"{path}: a line has more than {LONGEST_LINE} bytes once it is unpacked; expected one record a "
                        "line, so leave the record out"
                    )
                yield line
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
