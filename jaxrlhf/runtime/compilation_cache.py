"""Compilation cache on disk: the next run loads compiled programs instead of compiling them again."""

import os
from pathlib import Path
from typing import Any

import jax

from jaxrlhf.runtime.cache_folder import cache_folder

MOST_BYTES = 2 * 2**30
"""Size limit of the default cache folder; a run prunes the folder to this limit when it starts."""


def turn_on() -> None:
    """Let JAX keep every program that it compiles; safe to call again.

    JAX's own settings take precedence: JAX_ENABLE_COMPILATION_CACHE=false keeps nothing, and a folder named by
    JAX_COMPILATION_CACHE_DIR is used and never pruned. The default is `jaxrlhf/xla` under XDG_CACHE_HOME or `~/.cache`.

    With several processes JAX lets only the first process write. On GPU and TPU a program's key is meant to be equal
    in all processes, so processes that share the folder load the first process's programs. On CPU the key depends
    on the process (JAX 0.10.2), and the other processes compile in every run.
    """
    if not _setting("jax_enable_compilation_cache"):
        return
    folder = _own_folder()
    if _setting("jax_compilation_cache_dir") is None and folder is not None and _writable(folder):
        jax.config.update("jax_compilation_cache_dir", str(folder))
        # JAX's own size limit makes JAX look at every file of the folder for each write: 0.15 s at 5000 files.
        prune(folder, most_bytes=MOST_BYTES)
    if _setting("jax_persistent_cache_min_compile_time_secs") == 1.0:  # JAX's default; most programs here take less
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def prune(folder: Path, *, most_bytes: int) -> None:
    """Remove the least recently used programs until the rest fit, and empty files that a crash left.

    Most file systems record the time of the last read to a day; some record only the time of the write.
    """
    newest = sorted(_programs(folder), key=lambda found: max(found[1].st_atime, found[1].st_mtime), reverse=True)
    total_bytes = 0
    for path, stat in newest:
        total_bytes += stat.st_size
        if stat.st_size == 0 or total_bytes > most_bytes:
            path.unlink(missing_ok=True)  # another run may prune too


def settings_row() -> tuple[str, str, str, str]:
    """Return the row of the settings table: number of kept programs, and their folder."""
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
    return getattr(jax.config, name)  # the attributes of jax.config have no types


def _own_folder() -> Path | None:
    caches = cache_folder()
    return None if caches is None else caches / "xla"


def _writable(folder: Path) -> bool:
    """Return whether files can be created in a folder; the folder need not exist yet."""
    # os.path.exists, because Path.exists raises below a folder that may not be read, such as another user's home.
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
