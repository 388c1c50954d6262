"""Benchmark of steps of a small model in several layouts and placements, compared with the cost model.

    python -m scripts.planning.predictions [--hardware FILE] [--write]

Runs PPO for a few steps in each layout on the local devices (eight CPU devices unless JAX_NUM_CPU_DEVICES says
otherwise), every run in a separate process. Reports predicted and measured seconds of each stage, and Spearman's rank
correlation of the steps. The figures of the devices are in a hardware file, or those saved in predictions.json.
The machine should be idle otherwise. `--write` renews predictions.json, docs/predictions.png and the table in
docs/planning.md.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any

os.environ["NPROC"] = os.environ.get("NPROC", "32")  # before JAX starts
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")

import numpy as np
from rich.console import Console
from rich.markdown import Markdown
from rich.progress import track

from jaxrlhf.config import (
    PPO,
    Arithmetic,
    Checkpointing,
    Config,
    Evaluation,
    FormatReward,
    FromScratch,
    KLInReward,
    Layout,
    Pool,
    Rewards,
    Rollout,
    Training,
)
from jaxrlhf.data.tokenizer import embedded_tokenizer
from jaxrlhf.planner.hardware import Hardware, hardware
from jaxrlhf.planner.problem import Lengths, question_of
from jaxrlhf.planner.search.mapping import search
from jaxrlhf.planner.workload import STAGES
from jaxrlhf.trainer.phase import load_data
from scripts.benchmarks import workload as bench
from scripts.pages import DOCS, RESULTS, ROOT, renew

STEPS = 5
"""Number of steps of a run; the first step is not counted."""

LAYOUTS = {
    "one device": Layout(),
    "data 8": Layout(),
    "fsdp 8, generation 8": Layout(fsdp=8, generation_tensor=8),
    "data 2 x tensor 4, generation 4": Layout(tensor=4, generation_tensor=4),
    "tensor 8, generation 8": Layout(tensor=8, generation_tensor=8),
    "data 4 x stage 2": Layout(stage=2),
    "stage 4 x tensor 2": Layout(stage=4, tensor=2),
    "stage 4 x tensor 2, generation 4 x 2": Layout(stage=4, tensor=2, generation_stage=4, generation_tensor=2),
}
"""Layouts of the actor; critic and reference use the training part of the same layout."""

POOLS = {
    "actor, reference 4 | critic 4": (Pool("policy", 4, ("actor", "reference")), Pool("value", 4, ("critic",))),
    "actor 4 | critic 2 | reference 2": (
        Pool("policy", 4, ("actor",)),
        Pool("value", 2, ("critic",)),
        Pool("frozen", 2, ("reference",)),
    ),
}


def configuration(name: str, *, workdir: str = "unused") -> Config:
    """Return the configuration of PPO on a model of 9 M weights, in one of the layouts or placements."""
    layout = LAYOUTS.get(name, Layout())
    trains = replace(layout, generation_stage=1, generation_tensor=1)
    return Config(
        name="prediction",
        model=FromScratch(384, 1536, num_layers=4, num_heads=8, num_kv_heads=8, head_dim=48),
        data=Arithmetic(),
        rewards=Rewards(parts=(FormatReward(),)),
        algorithm=PPO(
            responses_per_update=16,
            kl=KLInReward(),
            critic=Training(layout=trains, tokens_per_microbatch=2048, remat="none"),
        ),
        actor=Training(layout=layout, tokens_per_microbatch=2048, remat="none"),
        reference_layout=trains,
        rollout=Rollout(prompts_per_step=4, responses_per_prompt=4, max_prompt_tokens=64, max_response_tokens=64),
        steps=STEPS,
        pools=POOLS.get(name, ()),
        devices=1 if name == "one device" else None,
        evaluation=Evaluation(every_steps=0, problems=8),
        checkpoint=Checkpointing(every_steps=0, keep_last=1, keep_best=0),
        workdir=workdir,
        compute_dtype="float32",
    )


def measure(name: str, workdir: str) -> None:
    """Run one configuration; called in a separate process."""
    import jaxrlhf

    jaxrlhf.run(configuration(name, workdir=workdir))


def measured(name: str, workdir: Path) -> dict[str, float]:
    """Run in a separate process; return the least seconds of each stage, and the mean response length.

    The first step is not counted. The minimum is used because other programs can only add time.
    """
    command = [sys.executable, "-m", "scripts.planning.predictions", "--measure", name, str(workdir)]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if process.returncode:
        raise RuntimeError(f"{name} failed:\n{process.stderr[-3000:]}")
    steps = stages_of(workdir / "timeline.json")[1:]
    metrics = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()][1:]
    response_tokens = median(step["response/length_mean"] for step in metrics)
    return {stage: min(step[stage] for step in steps) for stage in STAGES} | {"response_tokens": response_tokens}


def stages_of(trace: Path) -> list[dict[str, float]]:
    """Return the seconds of each stage of each step, from the start of its first call to the end of its last call."""
    text = trace.read_text().rstrip().rstrip(",")
    events = [event for event in json.loads(text + "]") if event["ph"] == "X"]
    kinds = {"generate_sequences": "generate", "compute_reward": "reward"}
    events.sort(key=lambda event: event["ts"])
    steps: list[dict[str, list[float]]] = []
    for event in events:
        verb = event["name"]
        stage = kinds.get(verb) or ("prepare" if verb.startswith("compute") else "update" if "update" in verb else None)
        if stage == "generate":
            steps.append({})
        if stage in STAGES and steps:
            start, end = event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6
            seen = steps[-1].setdefault(stage, [start, end])
            seen[1] = max(seen[1], end)
    return [{stage: end - start for stage, (start, end) in step.items()} for step in steps if len(step) == len(STAGES)]


def predicted(name: str, lengths: Lengths, machine: Hardware) -> dict[str, float]:
    """Predict the seconds of each stage."""
    config = configuration(name)
    problem = question_of(config, machine, lengths=lengths).problem
    if problem.pools is None:
        together = tuple(role.name for role in problem.roles)
        problem = replace(problem, pools=((together, config.devices or machine.devices),))
    layouts = {role: (layout,) for role, layout in layouts_of(name).items()}
    plan = search(replace(problem, layouts=layouts)).plans[0]
    return {stage: plan.stage_seconds[stage] for stage in STAGES}


def layouts_of(name: str) -> dict[str, Layout]:
    """Return the layout of each role."""
    config = configuration(name)
    assert isinstance(config.algorithm, PPO) and config.reference_layout is not None
    return {
        "actor": config.actor.layout,
        "critic": config.algorithm.critic.layout,
        "reference": config.reference_layout,
    }


def rank_correlation(one: list[float], other: list[float]) -> float:
    """Return Spearman's rank correlation of numbers without ties."""
    first, second = (np.argsort(np.argsort(values)).astype(float) for values in (one, other))
    return float(np.corrcoef(first, second)[0, 1])


def machine_of(file: str | None) -> Hardware:
    """Read the hardware from a file, or from the saved predictions."""
    if file is None:
        return Hardware(**json.loads((RESULTS / "predictions.json").read_text())["about"]["hardware"])
    return hardware(file)


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hardware", help="hardware file; default: as in predictions.json")
    parser.add_argument("--write", action="store_true", help="renew results, picture and table")
    parser.add_argument("--only", nargs="*", help="names of layouts")
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.measure:
        measure(*flags.measure)
        return
    machine = machine_of(flags.hardware)
    problems = load_data(configuration("data 8"), embedded_tokenizer()).train.problems
    prompt_tokens = float(np.mean([len(problem.prompt_tokens) for problem in problems]))
    names = flags.only or [*LAYOUTS, *POOLS]
    rows: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for index, name in enumerate(track(names, "running", console=Console(stderr=True))):
            found = measured(name, Path(folder) / str(index))
            lengths = Lengths(prompt_tokens, found.pop("response_tokens"))
            rows[name] = {"measured_s": found, "predicted_s": predicted(name, lengths, machine)}
    result = summary(rows)
    Console().print(Markdown(in_markdown(rows, result)))
    if flags.write:
        about = {"hardware": asdict(machine), **bench.about("jax")}
        (RESULTS / "predictions.json").write_text(json.dumps({"about": about, **result, "runs": rows}, indent=2) + "\n")
        draw(rows, result, DOCS / "predictions.png")
        renew(DOCS / "planning.md", {"predictions": in_markdown(rows, result)})


def summary(rows: dict[str, Any]) -> dict[str, float]:
    """Return the rank correlation of predicted and measured runs, and the worst ratios of single stages."""
    totals = {kind: [sum(row[kind].values()) for row in rows.values()] for kind in ("measured_s", "predicted_s")}
    ratios = [row["predicted_s"][stage] / row["measured_s"][stage] for row in rows.values() for stage in STAGES]
    return {
        "rank_correlation": rank_correlation(totals["measured_s"], totals["predicted_s"]),
        "least_ratio": min(ratios),
        "largest_ratio": max(ratios),
        "stages_within_2x": sum(0.5 <= ratio <= 2 for ratio in ratios) / len(ratios),
    }


def in_markdown(rows: dict[str, Any], result: dict[str, float]) -> str:
    """Return the table of the page: predicted / measured seconds."""
    lines = [f"| run | {' | '.join(STAGES)} | step | ratio |", "|---|---|---|---|---|---|"]
    for name, row in rows.items():
        pairs = [(row["predicted_s"][stage], row["measured_s"][stage]) for stage in STAGES]
        pairs.append((sum(one for one, _ in pairs), sum(other for _, other in pairs)))
        ratio = pairs[-1][0] / pairs[-1][1]
        label = name.replace("|", "\\|")
        lines.append(f"| {label} | {' | '.join(f'{one:.2f} / {other:.2f}' for one, other in pairs)} | {ratio:.2f} |")
    lines += ["", f"Seconds predicted / measured. Rank correlation of the steps: {result['rank_correlation']:.2f}. "]
    lines[-1] += f"Ratios of single stages: {result['least_ratio']:.2f} to {result['largest_ratio']:.2f}."
    return "\n".join(lines)


def draw(rows: dict[str, Any], result: dict[str, float], path: Path) -> None:
    """Plot predicted over measured seconds of a step."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 5.5), layout="constrained")
    axes = figure.subplots()
    for name, row in rows.items():
        x, y = sum(row["measured_s"].values()), sum(row["predicted_s"].values())
        axes.scatter(x, y, s=50)
        axes.annotate(name, (x, y), xytext=(6, -3), textcoords="offset points", fontsize=8)
    ends = np.array([min(axes.get_xlim()[0], axes.get_ylim()[0]), max(axes.get_xlim()[1], axes.get_ylim()[1])])
    axes.plot(ends, ends, color="grey", linewidth=1)
    axes.fill_between(ends, ends / 2, ends * 2, color="grey", alpha=0.12, label="within 2x")
    axes.set(xlabel="measured seconds of a step", ylabel="predicted seconds of a step", xlim=ends, ylim=ends)
    axes.set_title(f"rank correlation {result['rank_correlation']:.2f}")
    axes.legend(loc="upper left")
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main()
