"""Compiled programs are kept on disk, and the next run loads them instead of compiling."""

import os
from pathlib import Path
from typing import Any

import jax

from jaxrlhf.runtime.cache_folder import cache_folder

MOST_BYTES = 2 * 2**30
"""Size of our own folder that a run leaves when it starts."""


def turn_on() -> None:
    """Let JAX keep every program that it compiles; safe to call again.

    JAX's own settings come first: JAX_ENABLE_COMPILATION_CACHE=false keeps nothing, and a folder given as
    JAX_COMPILATION_CACHE_DIR is taken, and never pruned. Ours is `jaxrlhf/xla` under XDG_CACHE_HOME or `~/.cache`.

    In a world of several processes JAX lets only the first one write. On GPU and TPU a program's key is meant to be the
    same in all, so that they load what the first one wrote if their machines share the folder. On CPU the key depends
    on the process (JAX 0.10.2), and the others compile in every run.
    """
    if not _setting("jax_enable_compilation_cache"):
        return
    folder = _own_folder()
    if _setting("jax_compilation_cache_dir") is None and folder is not None and _writable(folder):
        jax.config.update("jax_compilation_cache_dir", str(folder))
        # JAX's own bound makes it look at every file of the folder whenever it writes one: 0.15 s at 5000 files.
        prune(folder, most_bytes=MOST_BYTES)
    if _setting("jax_persistent_cache_min_compile_time_secs") == 1.0:  # JAX's default; most of ours take less
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def prune(folder: Path, *, most_bytes: int) -> None:
    """Remove the programs that were not used for longest until the others fit, and what a crash left empty.

    How long ago a program was read is known to a day on most file systems, and on some only when it was written.
    """
    newest = sorted(_programs(folder), key=lambda found: max(found[1].st_atime, found[1].st_mtime), reverse=True)
    total_bytes = 0
    for path, stat in newest:
        total_bytes += stat.st_size
        if stat.st_size == 0 or total_bytes > most_bytes:
            path.unlink(missing_ok=True)  # another run may prune too


def settings_row() -> tuple[str, str, str, str]:
    """Row of the settings table: number of kept programs, and their folder."""
    where = _setting("jax_compilation_cache_dir")
    if not _setting("jax_enable_compilation_cache"):
        value, note = "not kept", "JAX_ENABLE_COMPILATION_CACHE is off"
    elif where is None:
        own = _own_folder()
        why = "this user has no home folder" if own is None else f"{own} cannot be written"
        value, note = "not kept", f"{why}; give JAX_COMPILATION_CACHE_DIR"
    elif "://" in where:
        value, note = "kept", where
    else:
        sizes = [stat.st_size for _, stat in _programs(Path(where))]
        value, note = f"{len(sizes)} kept", f"{sum(sizes) / 2**20:.1f} MiB in {where}"
        if not sizes:
            value, note = "none yet", f"this run compiles and keeps them in {where}"
    return ("run", "compiled programs", value, note)


def _setting(name: str) -> Any:
    return getattr(jax.config, name)  # its attributes have no types


def _own_folder() -> Path | None:
    caches = cache_folder()
    return None if caches is None else caches / "xla"


def _writable(folder: Path) -> bool:
    """True if files can be made there; it need not exist yet."""
    # Of os.path, because Path's raises where a folder above may not be looked into, such as another user's home.
    there = next(path for path in (folder, *folder.parents) if os.path.exists(path))
    return os.access(there, os.W_OK | os.X_OK)


def _programs(folder: Path) -> list[tuple[Path, os.stat_result]]:
    found = []
    for path in folder.glob("*-cache"):
        try:
            found.append((path, path.stat()))
        except FileNotFoundError:  # another run has just pruned it
            continue
    return found
