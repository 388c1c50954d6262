"""Checks of output paths, made before the work whose results they are for."""

import os
from pathlib import Path

from jaxrlhf.config.refusal import Refusal


def check_writable(place: Path) -> None:
    """Raise `Refusal` unless a file or folder can be written at a path; parent folders may not exist yet."""
    # os.path.exists, because Path.exists raises if a parent folder is not accessible.
    nearest = next(path for path in (place, *place.absolute().parents) if os.path.exists(path))
    if nearest != place and not os.path.isdir(nearest):
        raise Refusal(f"{place} cannot be written: {nearest} is not a folder; choose another path")
    if not os.access(nearest, os.W_OK | os.X_OK if os.path.isdir(nearest) else os.W_OK):
        raise Refusal(f"{place} cannot be written: no permission to write to {nearest}; choose another path")


def check_file(name: str, file: Path, *suffixes: str) -> None:
    """Raise `Refusal` unless a file with one of the suffixes can be written in an existing folder."""
    if file.suffix not in suffixes or file.is_dir():
        raise Refusal(f"{name} must be a file that ends in {' or '.join(suffixes)}, got {str(file)!r}")
    if not file.parent.is_dir():
        raise Refusal(f"{name} {str(file)!r}: there is no folder {str(file.parent)!r}; create it, or choose another")
    check_writable(file)
