"""Benchmark of reward functions and programs in processes, of one or several checkouts. Prints one JSON line.

    python -m scripts.benchmarks.agents.scoring [CHECKOUT ...] [--rounds 5] [--workers 2]

A trivial function is called on many responses, and a trivial program is run for some, as `Scorer` does in a run. Each
measurement is a separate process; checkouts take turns, so that a change of the machine's load meets all of them.
Figures are the medians of the rounds: calls per second, and CPU milliseconds of a call, which include the start of the
processes.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).parents[3]
CALLS = {"function": 20_000, "program": 60}
CODE = "def reward(prompt, response, answer, record):\n    return len(response) % 2\n"
PROGRAM = "```python\nprint(sum(map(int, input().split())))\n```"
RECORD = {"tests": {"inputs": ["1 2\n"], "outputs": ["3\n"]}}


def measure(kind: str, workers: int, folder: Path) -> dict[str, float]:
    """Score responses with one kind of part; return the figures."""
    from jaxrlhf import config
    from jaxrlhf.rewards.scorer import Scorer

    (folder / "code.py").write_text(CODE)
    part = config.FunctionReward(f"{folder / 'code.py'}:reward") if kind == "function" else config.CodeReward()
    calls = CALLS[kind]

    def score(scorer: Scorer, count: int) -> None:
        scores = scorer.score(["p"] * count, [PROGRAM] * count, [None] * count, [RECORD] * count)
        assert scores.scorable_B.all()

    with Scorer(config.Rewards(parts=(part,), workers=workers)) as scorer:
        score(scorer, 8 * workers)  # forks the processes
        start = time.perf_counter()
        score(scorer, calls)
        seconds = time.perf_counter() - start
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    cpu_s = sum(one.ru_utime + one.ru_stime for one in used)
    return {"calls_per_s": calls / seconds, "cpu_ms": 1000 * cpu_s / calls}


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkouts", nargs="*", type=Path, default=[ROOT], metavar="CHECKOUT")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--measure", nargs=2, metavar=("KIND", "FOLDER"), help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.measure:
        kind, folder = flags.measure
        print(json.dumps(measure(kind, flags.workers, Path(folder))))
        return

    figures: dict[str, dict[str, Any]] = {str(checkout): {} for checkout in flags.checkouts}
    for kind in CALLS:
        rounds: dict[str, list[dict[str, float]]] = {checkout: [] for checkout in figures}
        for number in range(flags.rounds):
            for checkout in list(figures)[:: -1 if number % 2 else 1]:
                with tempfile.TemporaryDirectory() as folder:
                    command = [sys.executable, __file__, "--workers", str(flags.workers), "--measure", kind, folder]
                    environment = os.environ | {"PYTHONPATH": str(Path(checkout).absolute()), "JAX_PLATFORMS": "cpu"}
                    done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
                    rounds[checkout].append(json.loads(done.stdout.splitlines()[-1]))
        for checkout, found in rounds.items():
            figures[checkout][kind] = {name: round(median(one[name] for one in found), 3) for name in found[0]}
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
