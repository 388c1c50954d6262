"""Lines of plain files, and of files compressed by gzip, bzip2, xz or Zstandard."""

import codecs
import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

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
    most = LONGEST_LINE if path.suffix in COMPRESSED else None
    with _opened(path) as file:
        while line := file.readline(-1 if most is None else most + 1):
            if most is not None and len(line) > most:
                raise Refusal(
                    f"{path}: a line has more than {most} bytes once it is unpacked; expected one record a line, so "
                    "leave the record out"
                )
            yield line


def content_of(path: Path) -> bytes:
    """Return the content of a file that holds one list.

    Raises:
      Refusal: A compressed file is incomplete or damaged, or its content is too large.
    """
    most = LARGEST_LIST if path.suffix in COMPRESSED else None
    with _opened(path) as file:
        content = file.read(-1 if most is None else most + 1)
    if most is not None and len(content) > most:
        raise Refusal(
            f"{path}: the list has more than {most} bytes once it is unpacked, and is read as a whole; save it with "
            "one object a line, as .jsonl"
        )
    return content


def starts_as_list(path: Path) -> bool:
    """Return True if the first character of a file, after spaces, opens a list.

    Raises:
      Refusal: A compressed file is incomplete or damaged.
    """
    with _opened(path) as file:
        start = file.read(1 << 16).removeprefix(codecs.BOM_UTF8)
        while start.isspace():
            start = file.read(1 << 16)
        return start.lstrip().startswith(b"[")


@contextmanager
def _opened(path: Path) -> Iterator[IO[bytes]]:
    """Open a file, unpacked if it is compressed; errors of unpacking become a `Refusal`."""
    if path.suffix not in COMPRESSED:
        with path.open("rb") as plain:
            yield plain
        return
    errors: tuple[type[Exception], ...] = (OSError,)
    try:
        if path.suffix == ".xz":  # unknown to pyarrow
            import lzma  # Python may be built without it

            errors = OSError, EOFError, lzma.LZMAError
            with lzma.open(path) as file:
                yield file
        else:
            import pyarrow

            with io.BufferedReader(pyarrow.input_stream(str(path))) as file:
                yield file
    except errors as error:
        raise Refusal(
            f"{path}: incomplete or damaged {path.suffix} file ({error}); download or compress it again"
        ) from error
