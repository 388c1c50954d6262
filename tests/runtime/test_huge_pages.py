"""Huge pages are requested where they can be had, once, and nothing else of the environment changes."""

import os
import subprocess
import sys

import pytest

from jaxrlhf.runtime.huge_pages import with_huge_pages

CPU = {"JAX_PLATFORMS": "cpu", "HOME": "/home/me"}
MADVISE, GLIBC = "always [madvise] never\n", ("glibc", "2.36")


@pytest.mark.parametrize(("given", "set_to"), [({}, ""), ({"GLIBC_TUNABLES": "a.b.c=2"}, "a.b.c=2:")])
def test_the_setting_is_added(given, set_to):
    found = with_huge_pages(CPU | given, mode=MADVISE, libc=GLIBC)
    assert found == CPU | {"GLIBC_TUNABLES": f"{set_to}glibc.malloc.hugetlb=1"}
    assert with_huge_pages(found, mode=MADVISE, libc=GLIBC) is None


@pytest.mark.parametrize(
    ("environ", "mode", "libc"),
    [
        ({}, MADVISE, GLIBC),  # a GPU or a TPU
        (CPU, "[always] madvise never", GLIBC),
        (CPU, "always madvise [never]", GLIBC),
        (CPU, MADVISE, ("glibc", "2.31")),
        (CPU, MADVISE, ("", "")),  # musl
        (CPU | {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=0"}, MADVISE, GLIBC),  # the user's own choice
    ],
)
def test_it_is_left_alone_where_it_changes_nothing(environ, mode, libc):
    assert with_huge_pages(environ, mode=mode, libc=libc) is None


@pytest.mark.skipif(sys.platform != "linux", reason="glibc is for Linux")
def test_a_command_starts_again_once_with_its_arguments(tmp_path):
    """The process keeps its id, and the second start finds the setting and continues."""
    program = f"""
import os, sys
import jaxrlhf.runtime.huge_pages as huge
with open({str(tmp_path / "starts")!r}, "a") as file:
    file.write(f"{{os.getpid()}} {{sys.argv[1:]}} {{os.environ.get('GLIBC_TUNABLES')}}\\n")
huge.KERNEL_MODE = type(huge.KERNEL_MODE)({str(tmp_path / "mode")!r})
huge.platform.libc_ver = lambda: ("glibc", "2.36")
huge.start_again_with_huge_pages()
"""
    (tmp_path / "mode").write_text(MADVISE)
    (tmp_path / "command.py").write_text(program)
    environ = {name: value for name, value in os.environ.items() if name != "GLIBC_TUNABLES"} | CPU
    subprocess.run([sys.executable, "-X", "dev", tmp_path / "command.py", "a b", "--c"], env=environ, check=True)
    first, second = (tmp_path / "starts").read_text().splitlines()
    assert first.endswith("['a b', '--c'] None") and second == first.replace("None", "glibc.malloc.hugetlb=1")
