"""Benchmark of steps that postpone groups, next to the synchronous step, on one pool.

    python scripts/bench_staleness.py [--steps 10] [--workload longtail] [--kept]
    JAX_NUM_CPU_DEVICES=2 python scripts/bench_staleness.py --parts [--responses 4]

Each row is `bench_step.py` in a separate process; further flags are passed to it. Writes `docs/staleness.json` and the
table in docs/async.md. `--kept` instead compares rows that compute the KV cache again or keep it. `--parts` compares
rows of two pools that learn from a step at once or in parts. Both flags write separate files and tables.
"""

import argparse
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import bench_workload as bench
from pages import DOCS, renew

SCRIPTS = Path(__file__).parent

ROWS: dict[str, list[str]] = {
    "0": [],
    "1, over-provision 1.25": ["--staleness", "1", "--over-provision", "1.25"],
    "1, over-provision 1.5": ["--staleness", "1", "--over-provision", "1.5"],
    "1, over-provision 1.5, bypass": ["--staleness", "1", "--over-provision", "1.5", "--old-logp", "bypass"],
}
"""Flags of `bench_step.py`, by schedule."""

KEPT: dict[str, list[str]] = {
    "1, over-provision 1.5": ROWS["1, over-provision 1.5"],
    "1, over-provision 1.5, kept": [*ROWS["1, over-provision 1.5"], "--on-new-weights", "keep"],
}
"""Flags of rows that show the gain of keeping the KV cache."""


PARTS: dict[str, list[str]] = {
    "one pool": [],
    "two pools": ["--apart"],
    "two pools, 2 parts": ["--apart", "--stream-parts", "2"],
    "two pools, 4 parts": ["--apart", "--stream-parts", "4"],
}
"""Flags of rows at staleness 0 that show the gain of learning from a step in parts."""


def measured(flags: list[str], *, workload: str, steps: int) -> dict[str, Any]:
    """Run `bench_step.py`; return its figures by name."""
    command = [sys.executable, str(SCRIPTS / "bench_step.py"), "--workload", workload, "--steps", str(steps), *flags]
    return bench.printed(command)


def table(runs: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a Markdown table of seconds of a step and its parts, speedups over the first row, and ages."""
    lines = [
        "| staleness | step s | times | generate s | prepare s | update s | mean age | computed again, of the tokens |",
        "|---|---|---|---|---|---|---|---|",
    ]
    first = next(iter(runs.values()))["step_s"]
    for name, run in runs.items():
        again = run.get("staleness/recomputed_tokens", 0.0) / run["generated_tokens"]
        seconds = [f"{run[part]:.2f}" for part in ("generate_s", "prepare_s", "update_s")]
        cells = [name, f"{run['step_s']:.2f}", f"{first / run['step_s']:.2f}", *seconds]
        cells += [f"{run.get('staleness/age_mean', 0.0):.2f}", f"{100 * again:.0f} %"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def table_of_pools(runs: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a Markdown table of step seconds, speedups over two pools without parts, and idle shares of pools."""
    lines = [
        "| staleness 0 | step s | times | generate s | prepare s | update s | idle: generation, policy |",
        "|---|---|---|---|---|---|---|",
    ]
    first = runs["two pools"]["step_s"]
    for name, run in runs.items():
        seconds = [f"{run[part]:.2f}" for part in ("generate_s", "prepare_s", "update_s")]
        shares = [run.get(f"time/{pool}_idle_share") for pool in ("generation", "policy")]
        idle = ", ".join("" if share is None else f"{share:.0%}" for share in shares).strip(", ")
        lines.append(f"| {name} | {run['step_s']:.2f} | {first / run['step_s']:.2f} | {' | '.join(seconds)} | {idle} |")
    return "\n".join(lines)


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--workload", choices=bench.WORKLOADS, default="longtail")
    parser.add_argument("--steps", type=int, default=10, help="the first two are not counted")
    parser.add_argument("--kept", action="store_true", help="compare keys and values kept and computed again")
    parser.add_argument("--parts", action="store_true", help="compare steps that are learnt from at once and in parts")
    flags, further = parser.parse_known_args()
    runs: dict[str, Any] = {}
    rows, page, place = (KEPT, "staleness_kept.json", "kept") if flags.kept else (ROWS, "staleness.json", "speed")
    if flags.parts:
        rows, page, place = PARTS, "staleness_parts.json", "parts"
    load = os.getloadavg()[0]
    for name, own in rows.items():
        runs[name] = measured([*own, *further], workload=flags.workload, steps=flags.steps)
        print(name, runs[name]["step_s"], flush=True)
    about = bench.about("jax") | ({"flags": " ".join(further)} if further else {})
    about["load"] = f"{load:.0f} to {os.getloadavg()[0]:.0f}"
    (DOCS / page).write_text(json.dumps({"rows": runs, "about": about}, indent=1) + "\n")
    shown = (table_of_pools if flags.parts else table)(runs)
    where = ", ".join([about["processor"], *further])
    text = f"{shown}\n\n{where}, at commit `{about['commit']}`, {about['date']}, load {about['load']}."
    renew(DOCS / "async.md", {place: text})


if __name__ == "__main__":
    main()
