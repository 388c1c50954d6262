"""Checksums of the files of a folder, such as a checkpoint item, so that damage is found before anything is read."""

import json
import stat
import zlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

FILE = "checksums.json"
"""File with size and Adler-32 of every other file of the folder, by relative path.

CRC-32 takes three times as long; both find every flipped bit.
"""

_OWNER = ""
"""Entry of `FILE` with the id of what the folder belongs to; no file has this name."""

_THREADS, _BLOCK = 4, 2**18


def write_checksums(folder: Path, *, owner: str = "") -> None:
    """Write the checksums of all files of a folder, whose files are complete.

    Args:
      owner: Id of what the folder is a part of, so that `damage_of` notices the part of another one.
    """
    checksums: dict[str, tuple[int, int | str]] = {**_checksums(folder, _files(folder)), _OWNER: (0, owner)}
    (folder / FILE).write_text(json.dumps(checksums))


def is_special(path: Path) -> bool:
    """Return True if a path is neither a regular file nor a folder; reading a named pipe would wait for its writer."""
    with suppress(FileNotFoundError):  # deleted meanwhile, or a broken link
        mode = path.stat().st_mode
        return not stat.S_ISREG(mode) and not stat.S_ISDIR(mode)
    return False


def special_file(folder: Path) -> str | None:
    """Return the damage of the first special file (`is_special`) below a folder; None without one."""
    return next((f"{path} is no regular file" for path in folder.rglob("*") if is_special(path)), None)


def damage_of(folder: Path, *, checked: bool, owner: str = "") -> str | None:
    """Return the first damage of a folder's files, beginning with a file's path; None if all are as saved.

    Args:
      checked: True if the folder was saved with checksums; a folder of an earlier version has none.
      owner: Id that `write_checksums` must have been given; "" accepts each, as of an earlier version.
    """
    if not folder.is_dir():
        return f"{folder} is missing"
    if not (folder / FILE).is_file():
        return f"{folder / FILE} is missing" if checked else None
    try:
        saved = {name: (size, checksum) for name, (size, checksum) in json.loads((folder / FILE).read_text()).items()}
    except (ValueError, TypeError, AttributeError, OSError, RecursionError) as error:
        return f"{folder / FILE} cannot be read: {error}"
    if saved.pop(_OWNER, (0, ""))[1] != owner and owner:
        return f"{folder} belongs to another checkpoint"
    if missing := sorted(saved.keys() - set(_files(folder))):
        return f"{folder / missing[0]} is missing"
    try:
        found = _checksums(folder, [*saved])
    except OSError as error:
        return f"{folder} cannot be read: {error}"
    for name, (size, checksum) in saved.items():
        if found[name][0] != size:
            return f"{folder / name} has {found[name][0]} bytes, expected {size}"
        if found[name][1] != checksum:
            return f"{folder / name} has a wrong checksum, so its contents changed after saving"
    return None


def _files(folder: Path) -> list[str]:
    """Return the relative paths of all files but the checksums."""
    paths = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return sorted(name for name in paths if name != FILE)


def _checksums(folder: Path, names: list[str]) -> dict[str, tuple[int, int]]:
    """Return size and Adler-32 of each file; several files are read at once."""
    with ThreadPoolExecutor(max_workers=_THREADS, thread_name_prefix="checksums") as pool:
        return dict(zip(names, pool.map(lambda name: _checksum(folder / name), names), strict=True))


def _checksum(path: Path) -> tuple[int, int]:
    size, checksum = 0, 1
    block = memoryview(bytearray(_BLOCK))  # reused for the file, so that reading allocates nothing
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(block):
            size, checksum = size + count, zlib.adler32(block[:count], checksum)
    return size, checksum
