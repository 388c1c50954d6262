"""Sandbox of programs: allowed actions, refused actions, and machines that cannot confine."""

import ctypes
import errno
import os
import platform
import re
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import pytest

from jaxrlhf import config
from jaxrlhf.rewards.sandbox import confined, sandbox
from jaxrlhf.rewards.sandbox.sandbox import MOST_CREATED, Ended, Limits, check_sandbox, run
from jaxrlhf.rewards.scorer import Scorer

LIMITS = Limits(time_s=5.0, memory_bytes=1 << 28, output_bytes=1 << 16)


@pytest.fixture(scope="module", autouse=True)
def _confining_machine():
    try:
        check_sandbox(LIMITS)
    except ValueError as error:
        pytest.skip(str(error))


ELSEWHERE = ('sys.platform != "linux"', 'sys.platform == "linux"')
"""Replacements in the text of `confined.py` that simulate another machine."""


def weakened(monkeypatch, tmp_path, old: str, new: str) -> None:
    source = sandbox._CONFINED.read_text()
    assert old in source
    (tmp_path / "weakened.py").write_text(source.replace(old, new))
    monkeypatch.setattr(sandbox, "_CONFINED", tmp_path / "weakened.py")


def attempt(*codes: str, limits: Limits = LIMITS) -> dict[str, str]:
    """Return the exception that each attempt raised; None without one."""
    program = f"""
for code in {codes!r}:
    try:
        exec(code, {{}})
        print()
    except Exception as error:
        print(type(error).__name__)
"""
    return dict(zip(codes, run(program, limits=limits).output.split("\n")[:-1], strict=True))


def test_a_program_reads_and_prints_and_has_its_libraries_and_its_own_directory():
    assert run("print(input()[::-1])", limits=LIMITS, stdin="äbc\n") == Ended(0, "cbä\n", True)
    assert run("print(open('/dev/stdin').read())", limits=LIMITS, stdin="a\nb") == Ended(0, "a\nb\n", True)
    program = """
import asyncio, json, os, tempfile, threading
import pytest  # an installed package
with open("file", "w") as file:
    file.write("1")
os.rename("file", "other")
tempfile.mkdtemp()
thread = threading.Thread(target=lambda: print("thread"))
thread.start()
thread.join()
async def say():
    print("loop")
asyncio.run(say())
print(len(os.listdir(".")), open("other").read(), len(os.urandom(3)))
os.remove("other")
"""
    assert run(program, limits=LIMITS) == Ended(0, "thread\nloop\n2 1 3\n", True)


WAYS_OUT = [
    "import socket; socket.socket()",
    "import socket; socket.create_connection(('127.0.0.1', {port}), 1)",
    "import socket; socket.socket(socket.AF_UNIX)",
    "import socket; socket.socketpair(type=socket.SOCK_DGRAM)",
    "import os; os.listdir(os.path.dirname('{outside}'))",
    "import fcntl; fcntl.fcntl(open('/usr/bin/env'), fcntl.F_SETLEASE, fcntl.F_RDLCK)",
    "import fcntl, os; fcntl.fcntl(os.open('/usr/lib', 0), fcntl.F_NOTIFY, fcntl.DN_CREATE)",
    "import os; os.fork()",
    "import subprocess; subprocess.run(['/bin/true'])",
    "import os; os.execv('/bin/true', ['true'])",
    "import os; os.kill(os.getppid(), 9)",
    "import os; os.kill(os.getpid(), 0)",
    "import resource; resource.prlimit(1, resource.RLIMIT_CPU, (1, 1))",
    "import fcntl, os; fcntl.fcntl(0, fcntl.F_SETOWN, 1)",
    "open('{outside}', 'a')",
    "import os; os.open('{outside}', os.O_RDONLY | os.O_TRUNC)",
    "open('{outside}')",
    "import os; os.truncate('{outside}', 0)",
    "import os; os.remove('{outside}')",
    "import os; os.rename('{outside}', 'here')",
    "import os; os.link('{outside}', 'here')",
    "import os; os.symlink('{outside}', 'here'); open('here', 'w')",
    "import os; os.mkdir('{outside}.new')",
    "open('{outside}.new', 'w')",
    "import os; os.chmod('{outside}', 0o777)",
    "import os; os.utime('{outside}', (1, 1))",
    "import os; os.setxattr('{outside}', 'user.x', b'1')",
    "open('/proc/self/mem', 'r+b')",
    "open('/proc/self/environ')",
    "open('/etc/passwd')",
    "open('/dev/shm/outside', 'w')",
]
WAYS_WITHOUT_A_SANDBOX = [
    "import socket; socket.create_connection(('127.0.0.1', {port}), 1)",
    "import os; os.fork() or os._exit(0)",
    "import subprocess; subprocess.run(['/bin/true'])",
    "open('{outside}', 'a')",
    "import os; os.truncate('{outside}', 0)",
    "import os; os.chmod('{outside}', 0o777)",
    "import os; os.utime('{outside}', (1, 1))",
    "open('/etc/passwd')",
    "import os; os.rename('{outside}', '{outside}.new')",
]


@pytest.fixture
def outside(tmp_path) -> Path:
    path = tmp_path / "outside"
    path.write_text("untouched")
    return path


def attempt_on(outside: Path, codes: list[str], limits: Limits) -> dict[str, str]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        return attempt(*(code.format(outside=outside, port=port) for code in codes), limits=limits)


def test_attempts_to_leave_the_sandbox_fail(outside):
    said = attempt_on(outside, WAYS_OUT, LIMITS)
    assert [code for code, error in said.items() if error not in ("PermissionError", "OSError")] == []
    assert outside.read_text() == "untouched" and outside.stat().st_mode & 0o111 == 0
    assert abs(outside.stat().st_mtime - time.time()) < 60
    assert [path.name for path in outside.parent.iterdir()] == [outside.name]


SHARED = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
libc.shmat.restype = ctypes.c_void_p
found = [libc.shmat({memory}, None, 0) in (None, 2**64 - 1), libc.semop({semaphore}, ctypes.byref(
    (ctypes.c_short * 3)(0, 1, 0)), 1) == -1, libc.msgsnd({queue}, ctypes.create_string_buffer(16), 4, 0o4000) == -1]
print(found, ctypes.get_errno())
"""


def test_shared_memory_semaphores_and_queues_of_others_cannot_be_reached(monkeypatch, tmp_path):
    libc = ctypes.CDLL(None, use_errno=True)
    ids = {
        "memory": libc.shmget(0, 4096, 0o1666),
        "semaphore": libc.semget(0, 1, 0o1666),
        "queue": libc.msgget(0, 0o1666),
    }
    try:
        assert min(ids.values()) >= 0
        program = SHARED.format(**ids)
        assert run(program, limits=LIMITS).output == f"[True, True, True] {errno.EPERM}\n"
        weakened(monkeypatch, tmp_path, *ELSEWHERE)
        assert run(program, limits=replace(LIMITS, allow_unsandboxed=True)).output.startswith("[False, False, ")
    finally:
        libc.shmctl(ids["memory"], 0, None)
        libc.semctl(ids["semaphore"], 0, 0)
        libc.msgctl(ids["queue"], 0, None)


@pytest.mark.parametrize("name", ["inotify_init1", "fanotify_init", "io_setup", "syslog", "seccomp"])
def test_watching_others_and_using_up_shared_resources_is_refused(name):
    number = confined.REFUSED[name][confined.MACHINES[platform.machine()][0]]
    program = f"""
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
print(libc.syscall({number}, 0, 0, 0, 0), ctypes.get_errno())
"""
    assert run(program, limits=LIMITS).output == f"-1 {errno.EPERM}\n"


@pytest.mark.parametrize(
    "create",
    [
        "threading.Thread(target=time.sleep, args=(60,), daemon=True).start()",
        "open(str(created), 'w').close()",
        "os.mkdir(str(created))",
        "os.symlink('nothing', str(created))",
        "os.close(os.open('.', os.O_TMPFILE | os.O_RDWR))",
    ],
)
def test_threads_and_files_are_counted(create):
    program = f"""
import os, threading, time
threading.stack_size(1 << 15)
created = 0
try:
    while True:
        {create}
        created += 1
except (OSError, RuntimeError):
    print(created, flush=True)
    os._exit(0)
"""
    assert run(program, limits=replace(LIMITS, memory_bytes=1 << 31)) == Ended(0, f"{MOST_CREATED}\n", False)


def test_a_program_cannot_claim_that_it_could_not_be_confined():
    """It reads the secret from the frames above, and writes to every open file."""
    program = """
import os, sys
frame, secret = sys._getframe(), ""
while frame is not None:
    secret = frame.f_locals.get("job", {}).get("secret", secret)
    frame = frame.f_back
for fd in range(3, 64):
    try:
        os.pwrite(fd, f"{secret} no isolation".encode(), 0)
        os.write(fd, b"no isolation")
    except OSError:
        pass
os._exit(0)
"""
    assert run(program, limits=LIMITS, test="assert False") == Ended(0, "", False)


def test_attempts_succeed_without_the_sandbox(monkeypatch, outside):
    """So the sandbox stops the attempts above, and not an error in the attempts."""
    weakened(monkeypatch, outside.parent, *ELSEWHERE)
    said = attempt_on(outside, WAYS_WITHOUT_A_SANDBOX, replace(LIMITS, allow_unsandboxed=True))
    assert [code for code, error in said.items() if error] == []


def test_limits_are_enforced_and_cannot_be_raised():
    started = time.monotonic()
    assert run("while True: pass", limits=replace(LIMITS, time_s=0.5)).status is None
    assert run("import time\nwhile True: time.sleep(1)", limits=replace(LIMITS, time_s=0.5)).status is None
    assert time.monotonic() - started < 4
    expected = {
        "import resource; resource.setrlimit(resource.RLIMIT_AS, (-1, -1))": "ValueError",
        "bytearray(1 << 29)": "MemoryError",
        "[bytearray(1 << 20) for _ in range(1 << 10)]": "MemoryError",
        "open('file', 'w').write('x' * (1 << 20))": "OSError",
        "import resource; assert resource.getrlimit(resource.RLIMIT_SIGPENDING)[1] > 64": "AssertionError",
    }
    assert attempt(*expected) == expected
    flood = run("while True: print('x' * 1000)", limits=LIMITS)
    assert flood.status != 0 and len(flood.output) == LIMITS.output_bytes


@pytest.mark.slow
def test_endlessly_nested_folders_fail_in_time_and_are_removed(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    burrow = """
import os
while True:
    os.mkdir("deeper")
    os.chdir("deeper")
"""
    started = time.monotonic()
    ended = run(burrow, limits=replace(LIMITS, time_s=0.5))
    assert ended.status != 0 and time.monotonic() - started < 1.4
    assert run("print(1)", limits=LIMITS) == Ended(0, "1\n", True)
    limit = time.monotonic() + 60
    while any(tmp_path.iterdir()) and time.monotonic() < limit:
        time.sleep(0.05)
    assert list(tmp_path.iterdir()) == []


def test_a_crash_and_an_early_exit_are_failures():
    assert run("import ctypes; ctypes.string_at(0)", limits=LIMITS).status < 0
    assert not run("import os; os._exit(0)", limits=LIMITS, test="assert False").whole
    assert not run("import sys; sys.exit(0)", limits=LIMITS, test="assert False").whole
    assert not run("x = 1", limits=LIMITS, test="assert x == 2").whole
    assert run("x = 1\nif __name__ == '__main__': input()", limits=LIMITS, test="assert x == 1").whole


@pytest.mark.parametrize(
    ("old", "new", "lacking"),
    [
        ("LANDLOCK_ABI = 3", "LANDLOCK_ABI = 99", r"write isolation: .* version 99"),
        ("_restrict_files, _restrict_calls", "_restrict_calls", r"write isolation: .* but a file outside was opened"),
        ('"socket": (41, 198),', "", r"network isolation: .* but a socket was created"),
        ("[column], 1, 8, header", "[column], 77, 8, header", r"network isolation: .* not possible here"),
        (*ELSEWHERE, r"takes Linux on x86_64 or aarch64"),
    ],
)
def test_a_machine_that_cannot_confine_is_refused_unless_allowed(monkeypatch, tmp_path, caplog, old, new, lacking):
    weakened(monkeypatch, tmp_path, old, new)
    with pytest.raises(ValueError, match=f"{lacking}.*allow_unsandboxed=True"):
        Scorer(config.Rewards(parts=(config.CodeReward(),)))
    check_sandbox(replace(LIMITS, allow_unsandboxed=True))
    assert re.search(f"with the rights of this run.*{lacking}", caplog.text)


def test_unsandboxed_children_end_with_the_program(monkeypatch, tmp_path):
    weakened(monkeypatch, tmp_path, *ELSEWHERE)
    note = tmp_path / "note"
    program = f"""
import os, time
if os.fork() == 0:
    time.sleep(1.0)
    open({str(note)!r}, "w")
os._exit(0)
"""
    assert run(program, limits=replace(LIMITS, allow_unsandboxed=True)).status == 0
    time.sleep(1.3)
    assert not note.exists()


def test_a_program_does_not_outlive_its_worker(tmp_path):
    program = "import ctypes, time; ctypes.CDLL(None).prctl(1, 0, 0, 0, 0); print(flush=True); time.sleep(100)"
    code = f"from jaxrlhf.rewards.sandbox.sandbox import *; run({program!r}, limits=Limits(60.0, 1 << 28, 1 << 16))"
    with subprocess.Popen([sys.executable, "-c", code], env=os.environ | {"TMPDIR": str(tmp_path)}) as worker:
        children = Path(f"/proc/{worker.pid}/task/{worker.pid}/children")
        until(lambda: children.read_text() != "")
        child = Path(f"/proc/{int(children.read_text())}")
        until(lambda: (child / "fd" / "1").stat().st_size > 0)  # the program has reached its sleep
        worker.kill()
    until(lambda: gone(child))


def gone(process: Path) -> bool:
    """Return whether a process is gone or waits to be reaped."""
    try:
        return "State:\tZ" in (process / "status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True


def until(reached) -> None:
    end = time.monotonic() + 10
    while not reached():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_limits_too_low_for_an_interpreter_are_refused():
    with pytest.raises(ValueError, match="are its limits too low"):
        check_sandbox(replace(LIMITS, memory_bytes=1 << 20))
