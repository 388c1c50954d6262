"""Places that commands write to, refused before the work whose result they are for."""

import os
from pathlib import Path

from jaxrlhf.config.refusal import Refusal


def check_writable(place: Path) -> None:
    """Raise `Refusal` unless a file or a folder can be written there; folders above it may be yet to be made."""
    # Of os.path, because Path's raises where a folder above may not be looked into.
    there = next(path for path in (place, *place.absolute().parents) if os.path.exists(path))
    if there != place and not os.path.isdir(there):
        raise Refusal(f"{place} cannot be written: {there} is no folder; write elsewhere")
    if not os.access(there, os.W_OK | os.X_OK if os.path.isdir(there) else os.W_OK):
        raise Refusal(f"{place} cannot be written: {there} may not be written to; write elsewhere")


def check_file(name: str, file: Path, *suffixes: str) -> None:
    """Raise `Refusal` unless a file of one of the suffixes can be written, in a folder that is there."""
    if file.suffix not in suffixes or file.is_dir():
        raise Refusal(f"{name} must be a file whose name ends in {' or '.join(suffixes)}, got {str(file)!r}")
    if not file.parent.is_dir():
        raise Refusal(f"{name} {str(file)!r}: there is no folder {str(file.parent)!r}; make it, or write elsewhere")
    check_writable(file)
