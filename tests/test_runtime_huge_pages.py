"""A command starts again with huge pages, once, with its own arguments; a user's value is kept."""

import os
import subprocess
import sys

import pytest

PROGRAM = """
import os, sys
from jaxrlhf.runtime.huge_pages import restart_with_huge_pages
print("start", flush=True)
restart_with_huge_pages()
print(os.environ.get("GLIBC_TUNABLES"), sys.argv[1:], sys.flags.dont_write_bytecode)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only glibc has the setting")
@pytest.mark.parametrize(
    ("before", "starts", "after"),
    [
        (None, 2, "glibc.malloc.hugetlb=1"),
        ("glibc.malloc.arena_max=2", 2, "glibc.malloc.arena_max=2:glibc.malloc.hugetlb=1"),
        ("glibc.malloc.hugetlb=0", 1, "glibc.malloc.hugetlb=0"),
    ],
)
def test_a_command_starts_again_with_huge_pages(tmp_path, before, starts, after):
    (tmp_path / "command.py").write_text(PROGRAM)
    environment = {name: value for name, value in os.environ.items() if name != "GLIBC_TUNABLES"}
    environment |= {} if before is None else {"GLIBC_TUNABLES": before}
    command = [sys.executable, "-B", "command.py", "--steps", "3"]
    run = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert run.stdout.splitlines() == ["start"] * starts + [f"{after} ['--steps', '3'] 1"]
