"""Checks of output paths, made before the work whose results they are for."""

import os
from pathlib import Path

from jaxrlhf.config.refusal import Refusal


def check_writable(place: Path) -> None:
    """Raise `Refusal` unless a file or folder can be written at a path; parent folders may not exist yet."""
    # os.path.exists, because Path.exists raises if a parent folder is not accessible.
    there = next(path for path in (place, *place.absolute().parents) if os.path.exists(path))
    if there != place and not os.path.isdir(there):
        raise Refusal(f"{place} cannot be written: {there} is no folder; write elsewhere")
    if not os.access(there, os.W_OK | os.X_OK if os.path.isdir(there) else os.W_OK):
        raise Refusal(f"{place} cannot be written: {there} may not be written to; write elsewhere")


def check_file(name: str, file: Path, *suffixes: str) -> None:
    """Raise `Refusal` unless a file with one of the suffixes can be written in an existing folder."""
    if file.suffix not in suffixes or file.is_dir():
        raise Refusal(f"{name} must be a file whose name ends in {' or '.join(suffixes)}, got {str(file)!r}")
    if not file.parent.is_dir():
        raise Refusal(f"{name} {str(file)!r}: there is no folder {str(file.parent)!r}; make it, or write elsewhere")
    check_writable(file)
