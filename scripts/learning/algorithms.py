"""Plot of how every algorithm that learns from scores learns one task, from the same policies with the same budget.

    python -m scripts.learning.algorithms [--seeds 3]

Writes `algorithms_learning.json` (greedy accuracy on held-out problems by step and seed, versions, commit)
and `docs/algorithms.png`. `task.py` defines the task. The seed determines the initial policy, the order of
the problems and the samples. Takes five minutes on two CPU cores.
"""

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import jaxrlhf
from jaxrlhf.config import Evaluation, Pretrained
from jaxrlhf.tracking.plots import read_curves
from scripts.benchmarks import workload as bench
from scripts.learning import task
from scripts.pages import DOCS, RESULTS

EVERY_STEPS = 2
COLUMNS = 5
BLUE, GREY = "#3b6fb6", "#c8c8c8"

Curves = dict[str, list[dict[int, float]]]
"""Accuracy by step of each seed, by algorithm."""


def learn(folder: Path, name: str, policies: Sequence[Pretrained]) -> list[dict[int, float]]:
    """Run an algorithm once from each policy."""
    curves = []
    for seed, policy in enumerate(policies):
        workdir = folder / f"{name}_{seed}"
        evaluation = Evaluation(every_steps=EVERY_STEPS, problems=task.HELD_OUT)
        config = task.task(folder, task.generating()[name], policy, seed=seed, evaluation=evaluation)
        jaxrlhf.run(jaxrlhf.override(config, {"workdir": str(workdir)}))
        curves.append(read_curves(workdir / "metrics.jsonl")["eval/accuracy"])
    return curves


def measure(*, seeds: int) -> dict[str, Any]:
    """Train every algorithm; return the curves and the conditions of the measurement."""
    with tempfile.TemporaryDirectory() as place:
        folder = task.write_records(Path(place))
        policies = [task.exported(folder, "guess", seed=seed) for seed in range(seeds)]
        curves = {name: learn(folder, name, policies) for name in task.generating()}
    return {"about": about(seeds), "accuracy": curves}


def about(seeds: int) -> dict[str, Any]:
    """Return task, machine, versions and date of the measurement."""
    return {
        "task": "three digits are given, say the first",
        "steps": task.STEPS,
        "responses_per_step": 64,
        "seeds": list(range(seeds)),
        **bench.about("jax", "numpy"),
    }


def draw(curves: Curves) -> Figure:
    """Plot a panel for each algorithm: its seeds, drawn over the means of all other algorithms."""
    rows = -(-len(curves) // COLUMNS)
    figure = Figure(figsize=(2.5 * COLUMNS, 2.1 * rows), layout="constrained")
    for place, name in enumerate(curves, start=1):
        axes = figure.add_subplot(rows, COLUMNS, place)
        for other in curves.values():
            axes.plot(*mean_of(other), color=GREY, linewidth=0.8)
        draw_one(axes, name, curves[name])
    figure.supxlabel("step of 64 responses", fontsize=10)
    figure.supylabel("greedy accuracy, held out", fontsize=10)
    return figure


def draw_one(axes: Axes, name: str, seeds: Sequence[dict[int, float]]) -> None:
    """Plot the seeds of an algorithm and their mean."""
    for curve in seeds:
        axes.plot(list(curve), list(curve.values()), color=BLUE, linewidth=0.8, alpha=0.5)
    axes.plot(*mean_of(seeds), color=BLUE, linewidth=2.0)
    axes.set_title(name, fontsize=9)
    axes.set_ylim(0, 1.03)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=7)


def mean_of(seeds: Sequence[dict[int, float]]) -> tuple[list[int], list[float]]:
    """Return the steps, and the mean over seeds at each step."""
    return list(seeds[0]), np.mean([list(curve.values()) for curve in seeds], axis=0).tolist()


def main() -> None:
    """Measure, write and plot."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    measured = measure(seeds=parser.parse_args().seeds)
    (RESULTS / "algorithms_learning.json").write_text(json.dumps(measured) + "\n")
    draw(measured["accuracy"]).savefig(DOCS / "algorithms.png", dpi=110)


if __name__ == "__main__":
    main()
