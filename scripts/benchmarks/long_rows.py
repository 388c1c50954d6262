"""Benchmark of an update on one long sequence: seconds and peak memory by tokens, for jaxrlhf, TRL and Tunix.

    python -m scripts.benchmarks.long_rows [--tokens 1024 2048 4096 ...] [--peers trl tunix] [--limit-s 300]

Each point has a separate process, so that peak memories do not mix: `update.py` for ours, and
`peers/trl/long_rows.py` and `peers/tunix/long_rows.py` with the peer's own loss, backward, clipping and AdamW. The last
512 tokens of the sequence are trained, and all frameworks recompute layers (gradient checkpointing). A framework that
runs out of memory or time is recorded as failed and gets no longer sequences. Writes results/long_rows.json after every
point, and docs/long_rows.png. Seconds are fitted by a + b T + c T^2, memory by a + b T.
"""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from scripts.benchmarks import compare_peers
from scripts.benchmarks import workload as bench
from scripts.pages import add_folders

OURS = "jaxrlhf"
COLOURS = {OURS: "#3b6fb6", "trl": "#e07b39", "tunix": "#4f9d69"}
TRAINED = 512
"""Number of trained tokens, at the end of the sequence."""

Points = dict[str, dict[int, dict[str, Any]]]
"""Figures by framework and number of tokens."""


def measured(framework: str, tokens: int, flags: argparse.Namespace) -> dict[str, Any]:
    """Run one process; return its figures or its failure."""
    where = ["--preset", flags.preset, "--models", str(flags.models), "--repeats", str(flags.repeats)]
    sizes = ["--tokens", str(tokens), "--trained", str(TRAINED)]
    if framework == OURS:
        rows = ["--sequences", "1", "--tokens-per-microbatch", str(tokens), "--remat", "full"]
        command = [sys.executable, "-m", "scripts.benchmarks.update", *rows]
    else:
        python = compare_peers.environment(framework, flags.environments)
        command = [python, "-m", f"scripts.benchmarks.peers.{framework}.long_rows"]
    load = os.getloadavg()[0]
    record = compare_peers.run([*command, *sizes, *where], limit_s=flags.limit_s, settings={})
    return record | {"load_before": round(load, 1)}


def good(points: dict[int, dict[str, Any]], name: str) -> tuple[list[int], list[float]]:
    """Return tokens and figures of the points that have the figure."""
    kept = {tokens: point[name] for tokens, point in sorted(points.items()) if name in point}
    return list(kept), list(kept.values())


def fits(points: dict[int, dict[str, Any]]) -> dict[str, Any]:
    """Fit memory linearly and seconds quadratically, by relative least squares; omit a fit with too few points."""
    found: dict[str, Any] = {}
    for name, degree in (("peak_rss_mb", 1), ("update_s", 2)):
        tokens, values = good(points, name)
        if len(tokens) > degree + 1:
            weights = 1 / np.array(values)
            powers = np.polyfit(tokens, values, degree, w=weights)
            off = np.abs(np.polyval(powers, tokens) * weights - 1).max()
            found[name] = {"powers_of_tokens": powers[::-1].tolist(), "farthest": round(float(off), 3)}
    return found


def draw(measures: Points) -> Figure:
    """Plot memory and seconds over tokens, without failed points."""
    figure = Figure(figsize=(8, 3.2), layout="constrained")
    for axes, name, label, scale in zip(
        figure.subplots(1, 2), ("peak_rss_mb", "update_s"), ("peak memory, GB", "seconds"), (1e-3, 1.0), strict=True
    ):
        for framework, points in measures.items():
            tokens, values = good(points, name)
            axes.plot(tokens, scale * np.array(values), "o-", color=COLOURS[framework], label=framework)
        axes.set(xscale="log", yscale="log", xlabel="tokens of the sequence", ylabel=label)
        axes.set_xscale("log", base=2)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=9)
    return figure


def main() -> None:
    """Measure, write and plot."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[2**power for power in range(10, 17)])
    parser.add_argument("--peers", nargs="*", choices=("trl", "tunix"), default=["trl", "tunix"])
    parser.add_argument("--preset", choices=bench.PRESETS, default="long")
    parser.add_argument("--repeats", type=int, default=1, help="timed updates after the first; 0 times the first")
    parser.add_argument("--limit-s", type=float, default=300.0, help="time limit of one process")
    parser.add_argument("--environments", type=Path, default=Path("bench_environments"), help="where the peers live")
    parser.add_argument("--models", type=Path, default=Path("bench_models"), help="where checkpoints are kept")
    add_folders(parser)
    flags = parser.parse_args()
    flags.models, flags.environments = flags.models.absolute(), flags.environments.absolute()
    bench.checkpoint(flags.preset, flags.models)
    measures: Points = {framework: {} for framework in (OURS, *flags.peers)}
    about = bench.about("jax") | {"preset": flags.preset, "trained": TRAINED}
    for tokens in sorted(flags.tokens):
        for framework, points in measures.items():
            if not any("failed" in point for point in points.values()):
                points[tokens] = measured(framework, tokens, flags)
                print(framework, tokens, json.dumps(points[tokens]), flush=True)
            content = {"about": about, "fits": {name: fits(each) for name, each in measures.items()}}
            compare_peers.write(flags.results / "long_rows.json", content | {"points": measures})
    print(json.dumps(content["fits"], indent=2))
    draw(measures).savefig(flags.docs / "long_rows.png", dpi=110)


if __name__ == "__main__":
    main()
