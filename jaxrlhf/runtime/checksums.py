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

PART_BYTES = 2**26
"""Most bytes of a file that one thread reads; a large file is read by several."""

_THREADS, _BLOCK, _MODULUS = 8, 2**18, 65521


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
    """Return size and Adler-32 of each file; several parts of files are read at once."""
    sizes = [(folder / name).stat().st_size for name in names]
    parts = [
        (name, start) for name, size in zip(names, sizes, strict=True) for start in range(0, size or 1, PART_BYTES)
    ]
    found = dict.fromkeys(names, (0, 1))
    with ThreadPoolExecutor(max_workers=_THREADS, thread_name_prefix="checksums") as pool:
        checksums = pool.map(lambda part: _checksum(folder / part[0], part[1]), parts)
        for (name, _), (size, checksum) in zip(parts, checksums, strict=True):
            found[name] = found[name][0] + size, _joined(found[name][1], checksum, size)
    return found


def _checksum(path: Path, start: int) -> tuple[int, int]:
    """Return size and Adler-32 of the part of a file that begins at `start`."""
    size, checksum = 0, 1
    block = memoryview(bytearray(_BLOCK))  # reused for the part, so that reading allocates nothing
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        while count := file.readinto(block[: PART_BYTES - size]):
            size, checksum = size + count, zlib.adler32(block[:count], checksum)
    return size, checksum


def _joined(first: int, second: int, second_bytes: int) -> int:
    """Return the Adler-32 of two texts, one after the other, from those of each.

    The low half of an Adler-32 is 1 plus the sum of the bytes, the high half the sum of the low halves after each byte.
    """
    low = (first & 0xFFFF) + (second & 0xFFFF) - 1
    high = (first >> 16) + (second >> 16) + second_bytes * ((first & 0xFFFF) - 1)
    return high % _MODULUS << 16 | low % _MODULUS
