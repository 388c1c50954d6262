"""Plot of how a policy with a vision tower learns to read pictures from random weights, with a shuffled control.

    python -m scripts.learning.vision [--seeds 0 1 2]

Runs `grpo_shapes`, and a control that shuffles the pictures among the questions so that seeing them cannot help.
Writes `vision_learning.json` and `docs/vision.png` after every run: greedy accuracy on held-out questions by step,
wall-clock seconds and CPU seconds, compilation included. The seed determines the initial weights, the order of the
demonstrations and the samples.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from jaxrlhf.tracking.plots import read_curves
from scripts.benchmarks import workload as bench
from scripts.pages import DOCS, RESULTS

RUNS = {"own pictures": ("#3b6fb6", []), "shuffled pictures": ("#b0752a", ["--data.shuffled"])}
"""Color of the lines and changed command-line flags, by run."""


def learn(changes: list[str], seed: int) -> dict[str, Any]:
    """Run in a separate process; return accuracy by step, wall-clock seconds and CPU seconds."""
    with tempfile.TemporaryDirectory() as folder:
        flags = ["--seed", str(seed), "--devices", "1", "--workdir", folder, *changes]
        command = [sys.executable, "-m", "jaxrlhf.train", "--config", "grpo_shapes.py", *flags]
        before, start = sum(os.times()[2:4]), time.monotonic()
        subprocess.run(command, check=True, env=os.environ | {"JAX_ENABLE_COMPILATION_CACHE": "false"})
        seconds, cores = time.monotonic() - start, sum(os.times()[2:4]) - before
        accuracy = dict(read_curves(Path(folder) / "metrics.jsonl")["eval/accuracy"])
    return {"accuracy": accuracy, "seconds": round(seconds), "cpu_seconds": round(cores)}


def draw(runs: dict[str, dict[str, Any]]) -> Figure:
    """Plot the accuracy of each run as a line."""
    figure = Figure(figsize=(6, 3.2), layout="constrained")
    axes = figure.add_subplot()
    for name, seeds in runs.items():
        for number, run in enumerate(seeds.values()):
            steps = [int(step) for step in run["accuracy"]]
            label = None if number else name
            axes.plot(steps, list(run["accuracy"].values()), color=RUNS[name][0], linewidth=1.4, label=label)
    axes.set_ylim(0, 1.03)
    axes.set_xlabel("step")
    axes.set_ylabel("accuracy, held out")
    axes.legend(frameon=False, loc="center right")
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def main() -> None:
    """Measure, write and plot."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    flags = parser.parse_args()
    measured: dict[str, Any] = {"about": bench.about("jax"), "runs": {}}
    for seed in flags.seeds:
        for name, (_, changes) in RUNS.items():
            measured["runs"].setdefault(name, {})[str(seed)] = learn(changes, seed)
            (RESULTS / "vision_learning.json").write_text(json.dumps(measured) + "\n")
            draw(measured["runs"]).savefig(DOCS / "vision.png", dpi=110)


if __name__ == "__main__":
    main()
