"""Measures steps under asynchronous schedules beside the synchronous one, on one pool and on two.

    python scripts/bench_staleness.py [--steps 10] [--workload longtail] [--only "1, over-provision 1.5" ...]

Each row is `bench_step.py` in a process of its own. On two pools one CPU device generates and the other trains, and
each computes in its own thread alone. Writes `docs/staleness.json` after every row, and the table in docs/async.md.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import bench_workload as bench
from pages import written

SCRIPTS = Path(__file__).parent
DOCS = SCRIPTS.parent / "docs"
PAGE = DOCS / "staleness.json"

ONE, TWO = "one pool, two threads", "two pools, a thread each"
ROWS: dict[tuple[str, str], list[str]] = {
    (ONE, "0"): [],
    (ONE, "1, over-provision 1.25"): ["--staleness", "1", "--over-provision", "1.25"],
    (ONE, "1, over-provision 1.5"): ["--staleness", "1", "--over-provision", "1.5"],
    (ONE, "1, over-provision 1.5, bypass"): ["--staleness", "1", "--over-provision", "1.5", "--old-logp", "bypass"],
    (TWO, "0"): ["--apart"],
    (TWO, "1"): ["--apart", "--staleness", "1"],
    (TWO, "1, bypass"): ["--apart", "--staleness", "1", "--old-logp", "bypass"],
    (TWO, "2, over-provision 1.5, bypass"): [
        *("--apart", "--staleness", "2"),
        *("--over-provision", "1.5", "--old-logp", "bypass"),
    ],
}
"""Flags of `bench_step.py`, by where a run is and its schedule."""


def measured(where: str, flags: list[str], *, workload: str, steps: int) -> dict[str, Any]:
    """What `bench_step.py` prints."""
    command = [sys.executable, str(SCRIPTS / "bench_step.py"), "--workload", workload, "--steps", str(steps), *flags]
    environment = os.environ | ({"JAX_NUM_CPU_DEVICES": "2", "NPROC": "1"} if where == TWO else {})
    done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.strip().splitlines()[-1])


def table(rows: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> str:
    """Seconds a step, the gain over the synchronous row of the same place, idle shares, and ages."""
    lines = [
        "| where | staleness | step s | times | generate s | idle: generate, learn | mean age | computed again |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for where, runs in rows.items():
        for name, run in runs.items():
            idle = [run.get(f"time/{pool}_idle_share") for pool in ("generation", "policy")]
            again = run.get("staleness/recomputed_tokens")
            cells = [
                *(where, name, f"{run['step_s']:.2f}", f"{runs['0']['step_s'] / run['step_s']:.2f}"),
                f"{run['generate_s']:.2f}",
                "" if idle[0] is None else ", ".join(f"{100 * share:.0f} %" for share in idle if share is not None),
                f"{run.get('staleness/age_mean', 0.0):.2f}",
                "" if again is None else f"{100 * again / run['generated_tokens']:.0f} %",
            ]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Measure, and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--workload", choices=bench.WORKLOADS, default="longtail")
    parser.add_argument("--steps", type=int, default=10, help="the first two are not counted")
    parser.add_argument("--only", nargs="*", help="schedules, such as '1, bypass'")
    flags = parser.parse_args()
    page: dict[str, Any] = json.loads(PAGE.read_text()) if PAGE.exists() else {"rows": {}}
    for (where, name), own in ROWS.items():
        if flags.only and name not in flags.only:
            continue
        run = measured(where, own, workload=flags.workload, steps=flags.steps)
        page["rows"].setdefault(where, {})[name] = run
        page["about"] = {"processor": bench.processor(), "commit": bench.commit(), "date": time.strftime("%Y-%m-%d")}
        PAGE.write_text(json.dumps(page, indent=1) + "\n")
        print(where, name, run["step_s"], flush=True)
    rows, about = page["rows"], page["about"]
    in_order = {
        where: {name: rows[where][name] for place, name in ROWS if place == where and name in rows.get(where, {})}
        for where in (ONE, TWO)
        if "0" in rows.get(where, {})
    }
    text = f"{table(in_order)}\n\n{about['processor']}, at commit `{about['commit']}`, {about['date']}."
    document = DOCS / "async.md"
    document.write_text(written(document.read_text(), {"speed": text}))


if __name__ == "__main__":
    main()
