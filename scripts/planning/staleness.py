"""Benchmark of steps that postpone groups, next to the synchronous step, on one pool.

    python -m scripts.planning.staleness [--steps 10] [--workload longtail]

Each row is `benchmarks/step.py` in a separate process; further flags are passed to it. Writes `staleness.json` and the
table in docs/async.md.
"""

import argparse
import json
import os
import sys
from collections.abc import Mapping
from typing import Any

from scripts.benchmarks import workload as bench
from scripts.pages import DOCS, RESULTS, renew

ROWS: dict[str, list[str]] = {
    "0": [],
    "1, over-provision 1.25": ["--staleness", "1", "--over-provision", "1.25"],
    "1, over-provision 1.5": ["--staleness", "1", "--over-provision", "1.5"],
    "1, over-provision 1.5, bypass": ["--staleness", "1", "--over-provision", "1.5", "--old-logp", "bypass"],
}
"""Flags of `benchmarks/step.py`, by schedule."""


def measured(flags: list[str], *, workload: str, steps: int) -> dict[str, Any]:
    """Run `benchmarks/step.py`; return its figures by name."""
    command = [sys.executable, "-m", "scripts.benchmarks.step", "--workload", workload, "--steps", str(steps), *flags]
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


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--workload", choices=bench.WORKLOADS, default="longtail")
    parser.add_argument("--steps", type=int, default=10, help="the first two are not counted")
    flags, further = parser.parse_known_args()
    runs: dict[str, Any] = {}
    load = os.getloadavg()[0]
    for name, own in ROWS.items():
        runs[name] = measured([*own, *further], workload=flags.workload, steps=flags.steps)
        print(name, runs[name]["step_s"], flush=True)
    about = bench.about("jax") | ({"flags": " ".join(further)} if further else {})
    about["load"] = f"{load:.0f} to {os.getloadavg()[0]:.0f}"
    (RESULTS / "staleness.json").write_text(json.dumps({"rows": runs, "about": about}, indent=1) + "\n")
    where = ", ".join([about["processor"], *further])
    text = f"{table(runs)}\n\n{where}, at commit `{about['commit']}`, {about['date']}, load {about['load']}."
    renew(DOCS / "async.md", {"speed": text})


if __name__ == "__main__":
    main()
