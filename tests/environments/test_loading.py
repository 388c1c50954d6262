"""User code is loaded or refused in one line, and its processes end with the run."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from jaxrlhf.config import Agent, Environment, Tools
from jaxrlhf.environments.forms import _describe
from jaxrlhf.environments.pool import EnvironmentPool
from jaxrlhf.episode import EnvironmentFailure, Reply

CODE = '''
import os, threading
def bare(a, b):
    return a + b
def typed(a: int) -> int:
    """Says nothing of its argument."""
def odd(session): ...
class Nothing: ...
class NoTools:
    def reset(self, **record): ...
class WantsSettings:
    def __init__(self, settings): ...
    def reset(self, record): ...
    def step(self, reply): ...
class OddStep:
    def reset(self, record): ...
    def step(self): ...
def broken():
    raise OSError("no such game")
def good():
    """A tool without arguments."""
    return "good"
class Pair:
    def reset(self, record, seed):
        self.bad = record["bad"]
        return str(os.getpid())
    def step(self, reply):
        if self.bad:
            os._exit(3)
        return str(os.getpid())
'''


@pytest.fixture(scope="module")
def code(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("code") / "my_code.py"
    path.write_text(CODE)
    (path.parent / "dies.py").write_text("import os\nos._exit(7)\n")
    (path.parent / "raises.py").write_text("import nothing_of_the_kind\n")
    (path.parent / "threaded.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(1000,), daemon=True).start()\n" + CODE
    )
    return path


@pytest.mark.slow
@pytest.mark.parametrize(
    "choices",
    [
        [Tools(functions=("{code}:bare",)), Tools(functions=("{code}:typed",))],
        [Tools(functions=("{code}:good", "{code}:good")), Tools(functions=("{code}:absent",))],
        [Tools(functions=("no_such_module:f",)), Tools(functions=("{folder}/raises.py:f",))],
        [Environment(factory=f"{{code}}:{name}") for name in ("Nothing", "NoTools", "WantsSettings")],
        [Environment(factory="{code}:OddStep"), Environment(factory="{code}:broken")],
        [Agent(program="{code}:odd"), Environment(factory="{folder}/dies.py:f")],
    ],
    ids=["schemas", "names", "files", "classes", "calls", "programs"],
)
def test_code_that_cannot_be_used_is_refused(code, choices, refused):
    for choice in choices:
        field = (
            "functions" if isinstance(choice, Tools) else "factory" if isinstance(choice, Environment) else "program"
        )
        value = getattr(choice, field)
        filled = [one.format(code=code, folder=code.parent) for one in ((value,) if isinstance(value, str) else value)]
        with refused():
            EnvironmentPool([type(choice)(**{field: filled[0] if isinstance(value, str) else tuple(filled)})])


def test_code_that_starts_threads_when_it_is_imported_runs_in_separate_interpreters(code):
    with EnvironmentPool([Environment(factory=f"{code.parent / 'threaded.py'}:Pair")]) as pool:
        pids = {pool.start(number, 0, {"bad": False}, 0).result(60).messages[0]["content"] for number in range(2)}
        assert len(pids) == 2
        assert {pool.step(number, Reply("", "")).result(60).messages[0]["content"] for number in range(2)} == pids


def test_the_end_of_a_separate_interpreter_is_reported(tmp_path):
    script = f"""
import os, socket, subprocess, threading
from pathlib import Path
from types import SimpleNamespace
from jaxrlhf.processes.forking import _Server
gate = threading.Event()
threading.Thread(target=gate.wait, daemon=True).start()  # with another thread, a fork is not safe
control, end = socket.socketpair()
control = SimpleNamespace(send=print, fileno=control.fileno)
server = _Server(control, 2, os.getpid(), None, "no:loader", Path("{tmp_path}"))
pid = server._make(end)
os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
subprocess.run(["true"])  # polls all child processes
server._reap()
gate.set()
"""
    run = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, check=True, timeout=120)
    assert "ProcessEnded" in run.stdout


def test_instances_may_share_a_process(code):
    with EnvironmentPool([Environment(factory=f"{code}:Pair", episodes_per_process=3)]) as pool:
        pids = [pool.start(n, 0, {"bad": n == 1}, 0).result(60).messages[0]["content"] for n in range(4)]
        assert pids[0] == pids[1] == pids[2] != pids[3]
        with pytest.raises(EnvironmentFailure, match="exited with status 3"):
            pool.step(1, Reply("", "")).result(60)
        for number in (0, 2):
            with pytest.raises(EnvironmentFailure, match="in a call of another episode"):
                pool.step(number, Reply("", "")).result(60)
        assert pool.step(3, Reply("", "")).result(60).messages[0]["content"] == pids[3]


@pytest.mark.parametrize("end", ["kill", "interrupt", pytest.param("exit", marks=pytest.mark.slow)])
def test_processes_do_not_outlive_the_run(tmp_path, end):
    hostile = Path(__file__).parents[1] / "support" / "hostile_environments.py"
    script = f"""
import os, time
from jaxrlhf.config import Environment, Tools
from jaxrlhf.environments.forms import _describe
from jaxrlhf.environments.pool import EnvironmentPool
from jaxrlhf.episode import Reply
pool = EnvironmentPool([Environment(factory="{hostile}:Hostile", call_s=100.0)])
for number, kind in enumerate(["ok", "hang", "hang_in_c", "daemon", "fork_bomb"]):
    pool.start(number, 0, {{"kind": kind, "where": "step", "folder": "{tmp_path}"}}, 0).result()
steps = [pool.step(number, Reply("", "")) for number in range(5)]
steps[0].result(), steps[3].result()
time.sleep(1.0)
print("ready", flush=True)
{"os._exit(0)" if end == "exit" else "time.sleep(100)"}
"""
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    run = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env=environment)
    assert run.stdout is not None and run.stdout.readline() == "ready\n"
    left = [int(path.name) for path in tmp_path.iterdir() if path.name.isdigit()]
    if end != "exit":
        left += [child.pid for child in psutil.Process(run.pid).children(recursive=True)]
        run.send_signal(signal.SIGKILL if end == "kill" else signal.SIGINT)
    run.wait(30)
    run.stdout.close()
    limit = time.monotonic() + 15
    while any(map(psutil.pid_exists, left)) or list(tmp_path.glob("jaxrlhf_*")):
        assert time.monotonic() < limit, [psutil.Process(pid) for pid in left if psutil.pid_exists(pid)]
        time.sleep(0.1)
    assert len(left) > 30


class Scales:
    def reset(self, **record): ...

    @staticmethod
    def scale(x: int) -> int:
        """Scales.

        Args:
            x: What.
        """
        return 2 * x

    def shift(self, x: int, by: int = 1) -> int:
        """Shifts.

        Args:
            x: What.
            by: How far.
        """
        return x + by


class StaticStep:
    @staticmethod
    def reset(record): ...

    @staticmethod
    def step(reply): ...


def test_a_static_method_needs_all_its_arguments():
    tools = {tool["function"]["name"]: tool["function"]["parameters"] for tool in _describe("Scales", Scales).schemas}
    assert {name: (sorted(own["properties"]), own["required"]) for name, own in tools.items()} == {
        "scale": (["x"], ["x"]),
        "shift": (["by", "x"], ["x"]),
    }
    assert _describe("StaticStep", StaticStep).schemas == ()
