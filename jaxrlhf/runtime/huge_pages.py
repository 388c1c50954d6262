"""Huge pages for arrays of a CPU run.

Programs of XLA:CPU allocate their temporary arrays at every call. In pages of 4 KiB, page faults take a tenth of an
update's time. The C library requests huge pages only if an environment variable is set when the process starts.
"""

import os
import platform
import sys
from collections.abc import Mapping
from pathlib import Path

TUNABLES, SETTING = "GLIBC_TUNABLES", "glibc.malloc.hugetlb"
"""Environment variable of glibc, and its setting for huge pages (1: `madvise`)."""
OLDEST_GLIBC = (2, 35)
KERNEL_MODE = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def with_huge_pages(environ: Mapping[str, str], *, mode: str, libc: tuple[str, str]) -> dict[str, str] | None:
    """Return the environment of a process with huge pages; None if the process has them already or cannot have them.

    Args:
      mode: Content of `KERNEL_MODE`, such as `always [madvise] never`.
      libc: Name and version of the C library, as `platform.libc_ver` returns them.
    """
    name, version = libc
    too_old = name != "glibc" or tuple(map(int, version.split(".")[:2])) < OLDEST_GLIBC
    given = environ.get(TUNABLES, "")
    if environ.get("JAX_PLATFORMS") != "cpu" or too_old or "[madvise]" not in mode or SETTING in given:
        return None
    return {**environ, TUNABLES: ":".join(filter(None, [given, f"{SETTING}=1"]))}


def start_again_with_huge_pages() -> None:
    """Replace this process by the same command with huge pages, if that changes anything.

    To be called first, before anything is read or written: the command starts from its beginning.
    """
    if sys.platform != "linux":
        return
    try:
        mode = KERNEL_MODE.read_text()
    except OSError:
        return
    environ = with_huge_pages(os.environ, mode=mode, libc=platform.libc_ver())
    if environ is not None:
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environ)
