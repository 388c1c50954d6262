"""Benchmark of the results in README: both arithmetic jobs, each in a separate process.

    python -m scripts.learning.readme_results

Writes `readme_results.json` (accuracy, seconds, throughput, machine, versions, commit) and the learning curves
`docs/<job>.png`, and prints README's table.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from scripts.benchmarks import workload as bench
from scripts.pages import DOCS, RESULTS

JOBS = ("ppo_arithmetic", "grpo_arithmetic")


def measure(job: str) -> dict[str, float]:
    """Run one job and read its metrics."""
    with tempfile.TemporaryDirectory() as workdir:
        start = time.perf_counter()
        command = [sys.executable, "-m", "jaxrlhf.train", "--config", f"{job}.py", "--workdir", workdir]
        # The seconds are those of a first run, compilation included.
        subprocess.run(command, check=True, env=os.environ | {"JAX_ENABLE_COMPILATION_CACHE": "false"})
        seconds = time.perf_counter() - start
        (DOCS / f"{job}.png").write_bytes((Path(workdir) / "curve.png").read_bytes())
        records = [json.loads(line) for line in (Path(workdir) / "metrics.jsonl").read_text().splitlines()]
    warm = records[2:]
    return {
        "accuracy_after_cold_start": records[0]["eval/accuracy_at_start"],
        "accuracy_at_end": records[-1]["eval/accuracy"],
        "steps": len(records),
        "seconds": round(seconds, 1),
        "step_s": round(median(record["time/step_s"] for record in warm), 2),
        "generated_tokens_per_s": round(median(record["throughput/generated_tokens_per_s"] for record in warm)),
        "trained_tokens_per_s": round(median(record["throughput/trained_tokens_per_s"] for record in warm)),
        "logp_gap_mean": max(record["sampler/logp_gap_mean"] for record in records),
        "logp_gap_max": max(record["sampler/logp_gap_max"] for record in records),
        "peak_memory_mib": round(records[-1]["memory/peak_bytes"] / 2**20),
    }


def main() -> None:
    """Measure, write and print."""
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    results: dict[str, Any] = {"machine": bench.about("jax"), "jobs": {job: measure(job) for job in JOBS}}
    (RESULTS / "readme_results.json").write_text(json.dumps(results, indent=2) + "\n")
    print("| | " + " | ".join(JOBS) + " |\n|---|" + "---|" * len(JOBS))
    for name in results["jobs"][JOBS[0]]:
        print(f"| {name.replace('_', ' ')} | " + " | ".join(f"{results['jobs'][job][name]:.3g}" for job in JOBS) + " |")


if __name__ == "__main__":
    main()
