"""Comparison of learning by staleness: arithmetic from one cold start per seed, under every schedule.

    python -m scripts.learning.staleness [--seeds 0 1 2] [--only "2" "2, uncorrected" ...] [--folder DIR]

Writes `staleness_learning.json` (held-out greedy accuracy by step and seed, and the mean age of the tokens) after
every run, `docs/staleness_learning.png`, and the table in docs/async.md. Everything runs on one pool, so the choice of
trained tokens does not depend on timing.
"""

import argparse
import json
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

from matplotlib.figure import Figure

import jaxrlhf
from jaxrlhf.config import GRPO, Checkpointing, Config, Evaluation, load
from jaxrlhf.tracking.plots import read_curves
from scripts.benchmarks import workload as bench
from scripts.learning.agents import imitating
from scripts.pages import DOCS, RESULTS, renew

FILE = RESULTS / "staleness_learning.json"
HELD_OUT, EVERY_STEPS, STEPS = 256, 4, 20
BLUE, ORANGE, GREEN, GREY = "#3b6fb6", "#e07b39", "#4a9e5c", "#8c8c8c"

Curve = Mapping[str, float]
"""Accuracy by step."""


def schedules() -> dict[str, Config]:
    """Return the runs by name, all from the configuration `grpo_arithmetic`."""
    config = replace(load("grpo_arithmetic"), steps=STEPS)
    rollout, algorithm = config.rollout, config.algorithm
    assert isinstance(algorithm, GRPO)
    found = {"0": config}
    for staleness in (1, 2, 4):
        old = replace(config, rollout=replace(rollout, staleness=staleness))
        found[str(staleness)] = old
        found[f"{staleness}, uncorrected"] = replace(old, algorithm=replace(algorithm, correction=None))
    for staleness in (1, 2):
        put_off = replace(rollout, staleness=staleness, over_provision=1.5)
        found[f"{staleness}, over-provision 1.5"] = replace(config, rollout=put_off)
    return found


def learn(config: Config, folder: Path, name: str, seed: int) -> dict[str, Any]:
    """Run; return the accuracy by step from 0 on, and the mean age of tokens in the last half of the steps."""
    config = replace(
        config,
        seed=seed,
        evaluation=Evaluation(every_steps=EVERY_STEPS, problems=HELD_OUT),
        checkpoint=Checkpointing(every_steps=0, keep_best=0),
    )
    config = replace(
        config,
        model=imitating(config, folder, seed),
        cold_start=None,
        workdir=str(folder / f"{name.replace(', ', '_').replace(' ', '_')}_{seed}"),
    )
    jaxrlhf.run(config)
    curves = read_curves(config.folder / "metrics.jsonl")
    ages = list(dict(curves.get("staleness/age_mean", {})).values())
    return {"accuracy": dict(curves["eval/accuracy"]), "age": mean(ages[len(ages) // 2 :]) if ages else 0.0}


def at(runs: Mapping[str, Any], step: int) -> list[float]:
    """Return the accuracy of each seed at a step."""
    return [run["accuracy"][str(step)] for run in runs.values()]


def table(measured: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a Markdown table: accuracy in percent of each schedule, mean and range over seeds."""
    steps = range(EVERY_STEPS, STEPS + 1, EVERY_STEPS)
    headings = ["staleness", "mean age", *(f"step {step}" for step in steps)]
    rows = [f"| {' | '.join(headings)} |", "|---" * len(headings) + "|"]
    for name, runs in measured.items():
        age = mean(run["age"] for run in runs.values())
        cells = [at(runs, step) for step in steps]
        shown = [f"{100 * mean(cell):.1f} ({100 * min(cell):.0f} to {100 * max(cell):.0f})" for cell in cells]
        rows.append(f"| {name} | {age:.2f} | {' | '.join(shown)} |")
    return "\n".join(rows)


def draw(measured: Mapping[str, Mapping[str, Any]]) -> Figure:
    """Plot a panel for each staleness above 0, next to staleness 0, with a line per seed."""
    figure = Figure(figsize=(8, 2.6), layout="constrained")
    panels = figure.subplots(1, 3, sharey=True)
    for axes, staleness in zip(panels, ("1", "2", "4"), strict=True):
        kinds = {
            "0": (GREY, "0"),
            staleness: (BLUE, f"{staleness}, corrected"),
            f"{staleness}, uncorrected": (ORANGE, f"{staleness}, uncorrected"),
            f"{staleness}, over-provision 1.5": (GREEN, f"{staleness}, over-provision"),
        }
        for name, (color, label) in kinds.items():
            for number, run in enumerate(measured.get(name, {}).values()):
                steps, heights = zip(*((int(step), value) for step, value in run["accuracy"].items()), strict=True)
                axes.plot(steps, heights, color=color, linewidth=1.2, label=label if number == 0 else None)
        axes.set(xlabel="step", title=f"staleness {staleness}", ylim=(0, 1.03))
        axes.legend(fontsize=7, loc="lower right", frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("greedy accuracy, held out")
    return figure


def main() -> None:
    """Measure, write and plot."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--only", nargs="*", choices=list(schedules()), default=list(schedules()))
    parser.add_argument("--folder", type=Path, help="folder of the runs; by default a temporary folder")
    flags = parser.parse_args()
    measured: dict[str, Any] = json.loads(FILE.read_text()) if FILE.exists() else {"runs": {}}
    with tempfile.TemporaryDirectory() as place:
        for seed in flags.seeds:
            for name in flags.only:
                found = learn(schedules()[name], flags.folder or Path(place), name, seed)
                measured["runs"].setdefault(name, {})[str(seed)] = found
                FILE.write_text(json.dumps(measured | {"about": bench.about("jax")}, indent=1) + "\n")
    runs = json.loads(FILE.read_text())["runs"]
    in_order = {name: runs[name] for name in schedules() if name in runs}
    renew(DOCS / "async.md", {"learning": table(in_order)})
    draw(in_order).savefig(DOCS / "staleness_learning.png", dpi=110)


if __name__ == "__main__":
    main()
