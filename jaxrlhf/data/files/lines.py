"""Lines of plain files, and of files compressed by gzip, bzip2, xz or Zstandard."""

import codecs
import gzip
import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jaxrlhf.config import Refusal

COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
"""Suffixes of compressed files."""

LONGEST_LINE = 1 << 28
"""Largest size in bytes of a line of a compressed file; a small file may claim to hold a line of many gigabytes."""

LARGEST_LIST = 1 << 28
"""Largest size in bytes of a compressed file that holds one list: the list is read as a whole."""


def lines_of(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file, in order.

    Raises:
      Refusal: A compressed file is incomplete or damaged, or one of its lines is too long.
    """
    if path.suffix not in COMPRESSED:
        with path.open("rb") as file:
            yield from file
        return
    with _unpacked(path) as file:
        while line := file.readline(LONGEST_LINE + 1):
            if len(line) > LONGEST_LINE:
                raise Refusal(
                    f"{path}: a line has more than {LONGEST_LINE} bytes once it is unpacked; expected one record a "
                    "line, so leave the record out"
                )
            yield line


def content_of(path: Path) -> bytes:
    """Return the content of a file that holds one list.

    Raises:
      Refusal: A compressed file is incomplete or damaged, or its content is too large.
    """
    if path.suffix not in COMPRESSED:
        return path.read_bytes()
    with _unpacked(path) as file:
        content = bytearray()
        while block := file.read(1 << 20):
            content += block
            if len(content) > LARGEST_LIST:
                raise Refusal(
                    f"{path}: the list has more than {LARGEST_LIST} bytes once it is unpacked, and is read as a whole; "
                    "save it with one object a line, as .jsonl"
                )
        return bytes(content)


def starts_as_list(path: Path) -> bool:
    """Return True if the first character of a file, after spaces, opens a list.

    Raises:
      Refusal: A compressed file is incomplete or damaged.
    """
    with path.open("rb") if path.suffix not in COMPRESSED else _unpacked(path) as file:
        start = file.read(1 << 16).removeprefix(codecs.BOM_UTF8)
        for _ in range(LONGEST_LINE >> 16):
            if not start or start.strip():
                break
            start = file.read(1 << 16)
        return bool(start.lstrip().startswith(b"["))


@contextmanager
def _unpacked(path: Path) -> Iterator[Any]:
    """Open a compressed file; errors of reading become a `Refusal`."""
    try:
        with _opened(path) as file:
            yield file
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
