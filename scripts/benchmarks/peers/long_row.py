"""Flags and report of the scripts that time a peer's update on one long sequence."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from scripts.benchmarks import workload as bench


def arguments(what: str) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=what.splitlines()[0])
    parser.add_argument("--preset", choices=bench.PRESETS, required=True)
    parser.add_argument("--tokens", type=int, required=True)
    parser.add_argument("--trained", type=int, required=True, help="trained tokens, at the end of the sequence")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--models", type=Path, default=Path("bench_models"), help="where checkpoints are kept")
    return parser.parse_args()


def report(flags: argparse.Namespace, times: Sequence[float], memory: bench.Memory, *packages: str) -> None:
    """Print seconds, peak memory and versions, as one line of JSON."""
    figures = {"tokens": flags.tokens, "update_s": round(median(times[1:] or times), 4)}
    print(json.dumps(figures | {"peak_rss_mb": round(memory.peak_mb), "versions": bench.versions(*packages)}))
