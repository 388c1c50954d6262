"""Benchmark of many live environments: seconds and memory to start, step and end them, and event loop delay.

python -m scripts.benchmarks.agents.environments --episodes 1000

An event loop runs alongside each stage and sleeps for 10 ms at a time; its delay is the 99th percentile of lateness.
"""

import argparse
import asyncio
import os
import platform
import tempfile
import threading
import time
from pathlib import Path

from jaxrlhf.config import Environment, Tools
from jaxrlhf.environments.pool import EnvironmentPool
from jaxrlhf.episode import Reply, ToolCall
from jaxrlhf.processes.descendants import descendants

CODE = '''
class Count:
    def reset(self, record, seed):
        self.turns = 0
        return "begin"

    def step(self, reply):
        self.turns += 1
        return f"turn {self.turns}"


def add(a: int, b: int) -> int:
    """Adds.

    Args:
        a: One.
        b: Other.
    """
    return a + b
'''
LIMIT_S = 600.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=1000)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--episodes_per_process", type=int, default=1)
    options = parser.parse_args()
    print(f"{platform.platform()}, {os.cpu_count()} cores, Python {platform.python_version()}")
    with tempfile.TemporaryDirectory() as folder:
        code = Path(folder) / "code.py"
        code.write_text(CODE)
        environment = Environment(factory=f"{code}:Count", episodes_per_process=options.episodes_per_process)
        clock = _Clock()
        with EnvironmentPool([environment, Tools(functions=(f"{code}:add",))]) as pool:
            clock("code loaded")
            for begun in [pool.start(number, 0, {}, number) for number in range(options.episodes)]:
                begun.result(LIMIT_S)
            clock(f"{options.episodes} instances made")
            processes = descendants(os.getpid(), b"")
            print(f"  {len(processes)} processes, {sum(map(_memory, processes)) / 1e6:.0f} MB of their own and shares")
            for turn in range(options.turns):
                for step in [pool.step(number, Reply("", "")) for number in range(options.episodes)]:
                    assert step.result(LIMIT_S).messages[0]["content"] == f"turn {turn + 1}"
            clock(f"{options.turns} steps of each")
            for end in [pool.finish(number) for number in range(options.episodes)]:
                end.result(LIMIT_S)
            clock("finished")
            for begun in [pool.start(number, 0, {}, number) for number in range(options.episodes)]:
                begun.result(LIMIT_S)
            clock("made anew, in the processes that are there")
            calls = Reply("", "", calls=(ToolCall("add", {"a": 1, "b": 2}),))
            for number in range(options.episodes, 2 * options.episodes):
                pool.start(number, 1, {}, 0).result(LIMIT_S)
            for _ in range(options.turns):
                for step in [pool.step(options.episodes + number, calls) for number in range(options.episodes)]:
                    step.result(LIMIT_S)
            clock(f"{options.turns} tool calls of {options.episodes} episodes")
        clock("closed")


class _Clock:
    def __init__(self) -> None:
        self._since, self._late_s = time.perf_counter(), list[float]()
        threading.Thread(target=lambda: asyncio.run(self._tick()), daemon=True).start()

    async def _tick(self) -> None:
        while True:
            before = time.perf_counter()
            await asyncio.sleep(0.01)
            self._late_s.append(time.perf_counter() - before - 0.01)

    def __call__(self, done: str) -> None:
        now, late_s = time.perf_counter(), sorted(self._late_s)
        late = f", a loop late by {1e3 * late_s[len(late_s) * 99 // 100]:.0f} ms" if late_s else ""
        print(f"{now - self._since:8.2f} s  {done}{late}", flush=True)
        self._since, self._late_s = now, []


def _memory(pid: int) -> int:
    """Return the memory of a process in bytes, with its share of shared pages."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return 1024 * int(line.split()[1])
    return 0


if __name__ == "__main__":
    main()
