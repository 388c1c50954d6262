"""Fork servers of reward functions: what an import prints, and servers that code stops."""

import re
import textwrap

import pytest
from reward_calls import run as calls_of

from jaxrlhf.config import Refusal
from jaxrlhf.processes import workers
from jaxrlhf.processes.output import MOST_BYTES
from jaxrlhf.rewards.pool import RewardPool
from jaxrlhf.rewards.protocol import Example, Function


def values_of(pool, responses, record=None):
    """Scores by index, and the indices of failures."""
    outcomes = [*calls_of(pool, [Example("p", response, None, record or {}) for response in responses])]
    return {one.index: one.value for one in outcomes if one.failure is None}, {
        one.index for one in outcomes if one.failure
    }


@pytest.mark.parametrize("fails", [False, True], ids=["loaded", "refused"])
def test_the_logged_output_of_an_import_is_bounded(tmp_path, fails):
    """Also that of a thread that the module starts, which prints while the function is called."""
    code = """
        import os, threading, time
        print("first")
        for _ in range(40):
            os.write(2, 65536 * b"x")
        def prints():
            while True:
                os.write(1, 4096 * b"y")
                time.sleep(0.001)
        threading.Thread(target=prints, daemon=True).start()
        def reward(prompt, response, answer, record):
            time.sleep(0.3)
            return 1.0
    """
    (tmp_path / "prints.py").write_text(textwrap.dedent(code) + "raise OSError('no such model')" * fails)
    output, function = tmp_path / "output.txt", Function("prints", f"{tmp_path / 'prints.py'}:reward")
    if fails:
        with pytest.raises(Refusal, match="no such model"):
            RewardPool([function], workers=1, timeout_s=10.0, output=output)
    else:
        with RewardPool([function], workers=1, timeout_s=60.0, output=output) as pool:
            assert values_of(pool, ["r"]) == ({0: 1.0}, set())
    printed = output.read_text()
    imports = 1 if fails else 2  # code that starts threads cannot be forked, so the worker imports it too
    assert printed.startswith("first\nxxx") and len(printed) < imports * MOST_BYTES + 2000
    dropped = re.findall(r"process \d+: (\d+) bytes of its output, after 262144, were not logged", printed)
    assert len(dropped) == imports and all(int(count) >= 40 * 65536 + 6 - MOST_BYTES for count in dropped)


@pytest.mark.parametrize("after", ["end", "value"])
def test_a_stopped_fork_server_is_replaced(tmp_path, monkeypatch, after):
    """The server owes the end of a process, or a new process. The next one may load for longer than a fork may take."""
    monkeypatch.setattr(workers, "SERVER_S", 1.0)
    monkeypatch.setattr(workers, "GRACE_S", 1.0)
    code = """
        import os, signal, time
        time.sleep(1.2)
        def reward(prompt, response, answer, record):
            if response == "stop":
                os.kill(os.getppid(), signal.SIGSTOP)
                if record["after"] == "end":
                    os._exit(3)
            return 1.0
    """
    (tmp_path / "stops.py").write_text(textwrap.dedent(code))
    function, record = Function("stops", f"{tmp_path / 'stops.py'}:reward"), {"after": after}
    responses = ["value", "stop", "value", "value", "value"]
    with RewardPool([function], workers=1 if after == "end" else 2, timeout_s=10.0, output=tmp_path / "out") as pool:
        values, failures = values_of(pool, responses, record)
        assert {**values, 1: 1.0} == dict.fromkeys(range(5), 1.0)
        assert failures == ({1} if after == "end" else set())
