"""Benchmark of steps with slow tools under each schedule. Prints a table, and writes it with `--write`.

    python -m scripts.benchmarks.agents.slow_tools [--steps 10] [--write]

GRPO, 16 prompts x 4 episodes of 6 turns with replies of 16 tokens; the environment takes 0 to 2 s for an answer. Each
row is a separate run. The first row is synchronous. Rows with over-provisioning train on the episodes that end first.
Rows marked `apart` generate on a separate pool during updates; the two CPU devices share the threads of one process.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import jaxrlhf
from jaxrlhf.config import (
    GRPO,
    Checkpointing,
    Config,
    Environment,
    Evaluation,
    FromScratch,
    Generated,
    Optimizer,
    Pool,
    Rewards,
    Rollout,
    Sampling,
    Training,
)
from scripts.benchmarks import workload as bench
from scripts.benchmarks.agents.talking import ANSWER_DIGITS, TURNS
from scripts.pages import DOCS, RESULTS, renew

TALKING = "scripts.benchmarks.agents.talking"
REPLY_TOKENS, ANSWER_TOKENS = 16, ANSWER_DIGITS + 8
APART = (Pool("policy", 1, ("actor",)), Pool("generation", 1, ("rollout", "reward")))

ROWS: dict[str, dict[str, Any]] = {
    "0": {},
    "1, over-provision 1.5": {"staleness": 1, "over_provision": 1.5, "order": "arrival"},
    "1, over-provision 2": {"staleness": 1, "over_provision": 2.0, "order": "arrival"},
    "1, apart": {"staleness": 1, "apart": True},
    "2, over-provision 1.5, apart": {"staleness": 2, "over_provision": 1.5, "order": "arrival", "apart": True},
}
"""Settings of the rollout, and whether generation has a separate pool, by schedule."""


def config_of(steps: int, *, apart: bool = False, **rollout: Any) -> Config:
    """Return the configuration of a run under a schedule."""
    return Config(
        name="slow_tools",
        model=FromScratch(hidden_size=256, intermediate_size=1024, num_layers=4, num_heads=8, num_kv_heads=4),
        data=Generated(f"{TALKING}:records", train_problems=1024, eval_problems=8),
        environment=Environment(
            factory=f"{TALKING}:Talks",
            max_turns=TURNS,
            turn_tokens=REPLY_TOKENS,
            cut_turns="close",
            observation_tokens=ANSWER_TOKENS,
            workers=128,
        ),
        rewards=Rewards(parts=()),
        algorithm=GRPO(responses_per_update=64),
        rollout=Rollout(
            prompts_per_step=16,
            responses_per_prompt=4,
            max_prompt_tokens=32,
            max_response_tokens=TURNS * (REPLY_TOKENS + ANSWER_TOKENS),
            sampling=Sampling(ignore_eos=True),
            **rollout,
        ),
        pools=APART if apart else (),
        actor=Training(optimizer=Optimizer(learning_rate=1e-6)),
        evaluation=Evaluation(every_steps=0),
        checkpoint=Checkpointing(every_steps=0, keep_best=0),
        steps=steps,
    )


def measure(name: str, steps: int) -> dict[str, float]:
    """Run a row in this process; return medians of the steps after the third."""
    with tempfile.TemporaryDirectory() as workdir:
        jaxrlhf.run(replace(config_of(steps, **ROWS[name]), workdir=workdir))
        records = [json.loads(line) for line in (Path(workdir) / "metrics.jsonl").read_text().splitlines()]
    wanted = ("time/step_s", "time/generate_s", "time/update_s", "staleness/age_mean", "tokens/generated")
    return {key: median(record[key] for record in records[3:]) for key in wanted if key in records[-1]}


def measured(name: str, steps: int) -> dict[str, Any]:
    """Return the figures of a row, run in a separate process."""
    devices = "2" if ROWS[name].get("apart") else "1"
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": devices}
    command = [sys.executable, "-m", "scripts.benchmarks.agents.slow_tools", "--row", name, "--steps", str(steps)]
    return bench.printed(command, env=environment)


def table(rows: Mapping[str, Mapping[str, float]]) -> str:
    """Return a Markdown table of seconds a step, speedups over the synchronous row, and ages."""
    lines = ["| staleness | step s | times | generate s | update s | mean age |", "|---|---|---|---|---|---|"]
    for name, row in rows.items():
        cells = [name, f"{row['time/step_s']:.2f}", f"{rows['0']['time/step_s'] / row['time/step_s']:.2f}"]
        cells += [f"{row['time/generate_s']:.2f}", f"{row['time/update_s']:.2f}"]
        cells.append(f"{row.get('staleness/age_mean', 0.0):.2f}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=10, help="the first three are not counted")
    parser.add_argument("--row", choices=ROWS, help="measure this schedule alone, in this process")
    parser.add_argument(
        "--write", action="store_true", help="write results/slow_tools.json and the table in docs/async.md"
    )
    flags = parser.parse_args()
    if flags.row:
        print(json.dumps(measure(flags.row, flags.steps)))
        return
    rows = {name: measured(name, flags.steps) for name in ROWS}
    print(table(rows))
    if flags.write:
        about = bench.about("jax")
        (RESULTS / "slow_tools.json").write_text(json.dumps({"rows": rows, "about": about}, indent=1) + "\n")
        text = f"{table(rows)}\n\n{about['processor']}, at commit `{about['commit']}`, {about['date']}."
        renew(DOCS / "async.md", {"slow tools": text})


if __name__ == "__main__":
    main()
