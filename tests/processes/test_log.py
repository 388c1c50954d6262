"""The log of user code is bounded, however many processes write to it, and however often a run is resumed."""

import os
import textwrap

from reward_calls import run as calls_of

from jaxrlhf.processes import output
from jaxrlhf.processes.output import MOST_LOGGED, Log
from jaxrlhf.rewards.pool import RewardPool
from jaxrlhf.rewards.protocol import Example, Function

PRINTS = """
    import os

    def reward(prompt, response, answer, record):
        print(200_000 * "x")
        os._exit(3)  # so that each call has another process
"""
NOTICE = b"this log has 67108864 bytes: further output of user code is not logged"


def test_the_log_of_many_processes_is_bounded_together(tmp_path):
    (tmp_path / "prints.py").write_text(textwrap.dedent(PRINTS))
    log, function = tmp_path / "output.txt", Function("prints", f"{tmp_path / 'prints.py'}:reward")
    log.touch()
    os.truncate(log, MOST_LOGGED - 500_000)  # what the run printed before it was resumed; the file takes no space
    for _ in range(2):
        with RewardPool([function], workers=2, timeout_s=10.0, output=log) as pool:
            assert {one.failure.cause for one in calls_of(pool, [Example("p", "r", None, {})] * 5)} == {"crash"}
    with log.open("rb") as file:
        file.seek(MOST_LOGGED - 500_000)
        printed = file.read()
    assert len(printed) < 500_000 + 4 * len(NOTICE)
    assert 400_000 <= printed.count(b"x") < 500_000
    assert 1 <= printed.count(NOTICE) <= 2 * 2  # of two pools, each with a fork server


def test_what_is_no_file_takes_no_more(monkeypatch):
    monkeypatch.setattr(output, "MOST_LOGGED", 1000)
    reads, writes = os.pipe()
    log = Log(writes)
    for _ in range(10):
        log.write(300 * b"y")
    log.close()
    printed = os.read(reads, 65536)
    os.close(reads)
    assert printed == 900 * b"y" + b"\n" + NOTICE + b"\n"
