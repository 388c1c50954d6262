"""Removal of folders that user code has written to."""

import os
import shutil
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

_REMOVE = 'chmod -R u+rwX -- "$1" 2>/dev/null; rm -rf -- "$1"'


def remove(folder: Path) -> None:
    """Remove a folder, also one that is too deep for Python's recursion, or holds folders that cannot be read."""
    with suppress(RecursionError):
        shutil.rmtree(folder, ignore_errors=True)
    if folder.exists():
        _run(_REMOVE, str(folder), check=False)


def remove_later(folder: str) -> None:
    """Remove a folder in a background process, which survives the end of this process and of the run."""
    environment = {"PATH": os.environ.get("PATH", os.defpath)}  # without the mark of this process's descendants
    _run(f"{{ {_REMOVE}; }} &", folder, env=environment, start_new_session=True, check=True)


def _run(command: str, folder: str, **how: Any) -> None:
    quiet = subprocess.DEVNULL
    subprocess.run(["sh", "-c", command, "sh", folder], stdin=quiet, stdout=quiet, stderr=quiet, **how)
