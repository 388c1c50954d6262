"""Measure how SmolLM2 learns to follow instructions, over seeds and with LoRA.

    python scripts/tools/get_smollm2.py models
    python -m scripts.learning.instructions [--seeds 0 1 2] [--lora 0] [--draw]

Runs `grpo_instructions` in processes of their own, compilation included, and writes `instructions.json` after every
run; then the tables of docs/instructions.md and the curve docs/instructions.png (with `--draw`: only these). Beside
accuracy, entropy and length it measures what the first model makes of the answers: their likelihood, and whether it
tells their topic among four.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from jaxrlhf.config.named_functions import load as load_function
from jaxrlhf.tracking.plots import read_curves
from scripts.benchmarks import workload as bench
from scripts.pages import DOCS, RESULTS, renew

FILE, PAGE, PICTURE = RESULTS / "instructions.json", DOCS / "instructions.md", DOCS / "instructions.png"
CONFIG = "grpo_instructions.py"
LORA = ("--actor.lora", "Lora", "--actor.lora.rank", "32", "--actor.optimizer.learning_rate", "5e-4")
"""Flags of the run with adapters."""
CURVES = {
    "eval/accuracy": "accuracy, held out",
    "policy/entropy": "entropy, nats a token",
    "response/length_mean": "length, tokens",
}
TOPICS, JUDGED, WIDTH = 4, 96, 96
"""Topics among which the first model tells an answer's, answers judged, and tokens of a judged row."""
SHOWN = 12

Answers = list[dict[str, Any]]


def learn(seed: int, changes: tuple[str, ...], model: str, folder: Path) -> dict[str, Any]:
    """Figures of one run in a process of its own."""
    command = [sys.executable, "-m", "jaxrlhf.train", "--config", CONFIG, "--model.path", model]
    command += ["--seed", str(seed), "--workdir", str(folder), *changes]
    start, before = time.monotonic(), sum(os.times()[2:4])
    # The seconds are those of a first run, compilation included.
    subprocess.run(command, check=True, env=os.environ | {"JAX_ENABLE_COMPILATION_CACHE": "false"})
    seconds, cores = time.monotonic() - start, sum(os.times()[2:4]) - before
    return figures_of(folder, model) | {"seconds": round(seconds), "cpu_seconds": round(cores)}


def figures_of(run: Path, model: str) -> dict[str, Any]:
    """Figures of the folder of a run that is over."""
    curves = read_curves(run / "metrics.jsonl")
    records = [json.loads(line) for line in (run / "evaluation.jsonl").read_text().splitlines()]
    settings = json.loads((run / "config.json").read_text())
    problems = load_function(f"{CONFIG}:prompts", "data function")(
        "evaluation", settings["data"]["eval_problems"], settings["data"]["seed"]
    )
    first, last = (pick(record["step"] for record in records) for pick in (min, max))
    ends = {"before": answers(records, first, problems), "after": answers(records, last, problems)}
    return {
        "curves": {name: {str(step): round(value, 4) for step, value in curves[name].items()} for name in CURVES},
        "accuracy": {name: round(mean(one["follows"] for one in given), 4) for name, given in ends.items()},
        "by_kind": {name: by_kind(given) for name, given in ends.items()},
        "about": {name: about(given) for name, given in ends.items()},
        "judged": judged(ends, model),
        "peak_gb": round(max(curves["memory/peak_bytes"].values()) / 1e9, 2),
        "step_s": round(float(np.median(list(curves["time/step_s"].values())[2:])), 1),
        "responses": [
            {"prompt": one["question"], "before": one["response"], "after": other["response"]}
            for one, other in zip(ends["before"], ends["after"], strict=True)
        ],
    }


def answers(records: list[dict[str, Any]], step: int, problems: list[dict[str, Any]]) -> Answers:
    """Greedy answers of one evaluation, each with its record of the data, in the order of the data."""
    found = []
    at_step = sorted((record for record in records if record["step"] == step), key=lambda record: len(record["prompt"]))
    for problem in problems:
        # The shortest prompt that has the text is the one of the record; equal prompts have equal answers.
        record = next(record for record in at_step if problem["prompt"] in record["prompt"])
        one = {"question": problem["prompt"], "topic": problem["topic"], "response": record["response"]}
        kinds = [kind for kind, _ in problem["instructions"]]
        found.append(one | {"kinds": kinds, "follows": record["parts"]["follows"]})
    return found


def by_kind(given: Answers) -> dict[str, float]:
    """Accuracy by kind of instruction where there is one, and of one and of two instructions."""
    groups = defaultdict(list)
    for one in given:
        groups["two" if len(one["kinds"]) > 1 else "one"].append(one["follows"])
        if len(one["kinds"]) == 1:
            groups[one["kinds"][0]].append(one["follows"])
    return {name: round(mean(values), 3) for name, values in groups.items()}


def about(given: Answers) -> dict[str, float]:
    """Shares of the answers that name their topic, and that differ from all others."""
    names_topic = load_function(f"{CONFIG}:names_topic", "function")
    named = [names_topic(one["response"], one["topic"]) for one in given]
    responses = [one["response"].lower() for one in given]
    return {"names_topic": round(mean(named), 3), "distinct": round(len(set(responses)) / len(responses), 3)}


def judged(ends: dict[str, Answers], model: str) -> dict[str, dict[str, float]]:
    """Judge the answers by the first model: nats a token, and the share whose topic the model tells among `TOPICS`.

    The prompt asks for a short sentence about a topic, and for no form. The topic of an answer is told where the answer
    is likelier after its own topic's prompt than after those of three other topics.
    """
    import jax
    import jax.numpy as jnp

    from jaxrlhf import models
    from jaxrlhf.data.tokenizer import load_tokenizer

    config, tokenizer = models.read_config(model), load_tokenizer(str(models.resolve(model)))
    params = models.load_params(model, config, "lm")

    @jax.jit
    def logp(token_RW: Any) -> Any:
        position_RW = jnp.broadcast_to(jnp.arange(token_RW.shape[1]), token_RW.shape)
        hidden = models.hidden_states(params, config, token_RW, position_RW, jnp.ones_like(token_RW)).hidden_RWD
        return models.token_logp(params, config, hidden, token_RW, temperature=1.0).logp

    def rows(topic: str, response: str) -> tuple[list[int], int]:
        chat = [{"role": "user", "content": f"Write a short sentence about {topic}."}]
        prompt = tokenizer.encode(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True))
        return [*prompt, *tokenizer.encode(response), tokenizer.eos_token_id], len(prompt)

    found = {}
    for name, given in ends.items():
        given = given[:: max(1, len(given) // JUDGED)][:JUDGED]
        topics = sorted({one["topic"] for one in given})
        told, nats = [], []
        for one in given:
            place = topics.index(one["topic"])
            choices = [topics[(place + far * len(topics) // TOPICS) % len(topics)] for far in range(TOPICS)]
            texts = [rows(topic, one["response"]) for topic in choices]
            token_RW = np.zeros((TOPICS, WIDTH), np.int32)
            for row, (ids, _) in enumerate(texts):
                token_RW[row, : len(ids)] = ids
            logp_RW = np.asarray(logp(token_RW))
            sums = [logp_RW[row, start : len(ids)].sum() for row, (ids, start) in enumerate(texts)]
            told.append(int(np.argmax(sums)) == 0)
            nats.append(-sums[0] / (len(texts[0][0]) - texts[0][1]))
        found[name] = {"tells_topic": round(mean(told), 3), "nats_per_token": round(float(mean(nats)), 3)}
    return found


def draw(runs: dict[str, dict[str, Any]]) -> Figure:
    """Curves of accuracy, entropy and length, a line a run; runs with adapters are dashed."""
    figure = Figure(figsize=(10, 3.1), layout="constrained")
    for place, (name, label) in enumerate(CURVES.items(), start=1):
        axes = figure.add_subplot(1, len(CURVES), place)
        for run, given in runs.items():
            series = given["curves"][name]
            style = "--" if run.startswith("lora") else "-"
            axes.plot([int(step) for step in series], list(series.values()), style, linewidth=1.3, label=run)
        axes.set_ylim(0, 1.03 if name == "eval/accuracy" else None)
        axes.set_xlabel("step")
        axes.set_title(label, fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25, linewidth=0.6)
    figure.axes[0].legend(frameon=False, fontsize=8, loc="lower right")
    return figure


def tables(measured: dict[str, Any]) -> dict[str, str]:
    """Parts of the page: figures of the runs, accuracy by kind, and answers before and after."""
    runs = measured["runs"]
    lines = [
        "| run | accuracy before | after | minutes | seconds a step | peak memory | names its topic | topic told among "
        "four | nats a token | distinct |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, run in runs.items():
        pairs = [
            [run[part][end][figure] for end in ("before", "after")]
            for part, figure in (("about", "names_topic"), ("judged", "tells_topic"))
        ]
        shares = [f"{100 * before:.0f} to {100 * after:.0f} %" for before, after in pairs]
        nats = [run["judged"][end]["nats_per_token"] for end in ("before", "after")]
        distinct = [100 * run["about"][end]["distinct"] for end in ("before", "after")]
        lines.append(
            f"| {name} | {100 * run['accuracy']['before']:.1f} % | **{100 * run['accuracy']['after']:.1f} %** | "
            f"{run['seconds'] / 60:.0f} | {run['step_s']:.0f} | {run['peak_gb']:.1f} GB | {' | '.join(shares)} | "
            f"{nats[0]:.2f} to {nats[1]:.2f} | {distinct[0]:.0f} to {distinct[1]:.0f} % |"
        )
    kinds = list(next(iter(runs.values()))["by_kind"]["before"])
    by_kind = ["| instruction | before | " + " | ".join(runs) + " |", "|---" * (2 + len(runs)) + "|"]
    for kind in sorted(kinds, key=lambda kind: (kind in ("one", "two"), kind)):
        before = next(iter(runs.values()))["by_kind"]["before"][kind]
        shares = [f"{100 * run['by_kind']['after'][kind]:.0f} %" for run in runs.values()]
        by_kind.append(f"| {kind.replace('_', ' ')} | {100 * before:.0f} % | {' | '.join(shares)} |")
    responses = next(iter(runs.values()))["responses"]
    chosen = responses[:: math.ceil(len(responses) / SHOWN)]
    shown = ["| prompt | before | after |", "|---|---|---|"]
    shown += [f"| {cell(one['prompt'])} | {cell(one['before'])} | {cell(one['after'])} |" for one in chosen]
    machine = measured["about"]
    where = f"{machine['processor']}, float32, {machine['date']}, commit `{machine['commit']}`."
    return {"runs": "\n".join([*lines, "", where]), "kinds": "\n".join(by_kind), "responses": "\n".join(shown)}


def cell(text: str) -> str:
    """Text in a cell of a table."""
    return text.replace("|", "\\|").replace("\n", "<br>").replace("<|", "&lt;|")


def main() -> None:
    """Measure, write and draw."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--lora", type=int, nargs="*", default=[0], help="seeds of runs with adapters")
    parser.add_argument("--model", default="models/SmolLM2-135M-Instruct.Q4_1.gguf")
    parser.add_argument("--runs", type=Path, help="folder that keeps the runs; a temporary one if not given")
    parser.add_argument("--draw", action="store_true", help="write the page and the picture of what was measured")
    flags = parser.parse_args()
    measured = json.loads(FILE.read_text()) if FILE.exists() else {"runs": {}}
    wanted = {f"seed {seed}": (seed, ()) for seed in flags.seeds} | {
        f"lora, seed {seed}": (seed, LORA) for seed in flags.lora
    }
    for name, (seed, changes) in {} if flags.draw else wanted.items():
        measured["about"] = bench.about("jax")
        with tempfile.TemporaryDirectory() as temporary:
            folder = (flags.runs or Path(temporary)) / name.replace(", ", "_").replace(" ", "_")
            measured["runs"][name] = learn(seed, changes, flags.model, folder)
        FILE.write_text(json.dumps(measured, indent=1) + "\n")
    renew(PAGE, tables(measured))
    draw(measured["runs"]).savefig(PICTURE, dpi=110)


if __name__ == "__main__":
    main()
