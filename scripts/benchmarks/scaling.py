"""Benchmark of how cost scales: generation with the number of sequences, an update with the number of tokens.

    python -m scripts.benchmarks.scaling [--sequences 64 128 256 512 1024] [--update-sequences 16 32 64 128]

Each point is a separate process of `engine.py` or `update.py`. Writes results/scaling.json and
docs/scaling.png: tokens per second should not depend on the number of sequences, and an update's seconds should be
linear in its tokens.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from scripts.benchmarks import workload as bench
from scripts.pages import add_folders

BLUE, ORANGE, GREY = "#3b6fb6", "#e07b39", "#8c8c8c"


def figures(script: str, **settings: Any) -> dict[str, Any]:
    """Run a script with these flags; return the figures that the script prints."""
    texts = [text for name, value in settings.items() for text in (f"--{name.replace('_', '-')}", str(value))]
    command = [sys.executable, "-m", f"scripts.benchmarks.{script}", *texts]
    found = bench.printed(command)
    print(script, *texts, json.dumps(found), flush=True)
    return found


def spread(rates: list[float]) -> float:
    """Return the largest distance from the mean, as a share of the mean."""
    mean = float(np.mean(rates))
    return max(abs(rate - mean) for rate in rates) / mean


def line(tokens: list[float], seconds: list[float]) -> tuple[float, float, float]:
    """Fit a line: return seconds per token, seconds at zero tokens, and the largest relative error of a point."""
    slope, start = np.polyfit(tokens, seconds, 1)
    off = max(abs(each - (start + slope * count)) / each for count, each in zip(tokens, seconds, strict=True))
    return float(slope), float(start), float(off)


def draw(generation: list[dict[str, Any]], updates: list[dict[str, Any]], png: Path) -> None:
    """Plot generation and updates, side by side."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    rates = [each["tokens_per_s"] for each in generation]
    mean = float(np.mean(rates))
    left.axhspan(0.85 * mean, 1.15 * mean, color=GREY, alpha=0.15, lw=0, label="mean, 15 % either way")
    left.plot([each["sequences"] for each in generation], rates, "o-", color=BLUE)
    left.set(xscale="log", xlabel="sequences", ylabel="generated tokens a second", ylim=(0, 1.4 * mean))
    ticks = [each["sequences"] for each in generation]
    left.set_xticks(ticks, [str(tick) for tick in ticks])
    left.minorticks_off()
    left.legend(frameon=False, fontsize=9)
    tokens, seconds = [each["tokens"] for each in updates], [each["update_s"] for each in updates]
    slope, start, _ = line(tokens, seconds)
    ends = np.array([0, max(tokens)])
    right.plot(ends, start + slope * ends, color=GREY, lw=1, label="least squares")
    right.plot(tokens, seconds, "o", color=ORANGE)
    right.set(xlabel="tokens of an update", ylabel="seconds", xlim=(0, None), ylim=(0, None))
    right.legend(frameon=False, fontsize=9)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(png, dpi=130)


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sequences", type=int, nargs="+", default=[64, 128, 256, 512, 1024], help="to generate")
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--update-sequences", type=int, nargs="+", default=[16, 32, 64, 128, 256], help="to train on")
    parser.add_argument("--tokens", type=int, default=192, help="of a sequence to train on")
    parser.add_argument("--preset", choices=bench.PRESETS, default="small")
    parser.add_argument("--models", type=Path, default=Path("bench_models"), help="where checkpoints are kept")
    add_folders(parser)
    flags = parser.parse_args()
    model: dict[str, Any] = {"preset": flags.preset, "models": flags.models.absolute()}
    sizes = {name: getattr(flags, name) for name in ("prompt_tokens", "new_tokens", "slots")}
    generation = [figures("engine", sequences=count, **sizes, **model) for count in flags.sequences]
    trained = flags.tokens * 2 // 3
    updates = [
        figures("update", sequences=count, tokens=flags.tokens, trained=trained, **model)
        for count in flags.update_sequences
    ]
    slope, start, off = line([each["tokens"] for each in updates], [each["update_s"] for each in updates])
    content = {
        **bench.about("jax"),
        "generation_spread": round(spread([each["tokens_per_s"] for each in generation]), 3),
        "update": {"seconds_a_token": slope, "seconds_at_none": start, "farthest_from_line": round(off, 3)},
        "generation_points": generation,
        "update_points": updates,
    }
    (flags.results / "scaling.json").write_text(json.dumps(content, indent=2) + "\n")
    draw(generation, updates, flags.docs / "scaling.png")
    print(json.dumps({name: content[name] for name in ("generation_spread", "update")}))


if __name__ == "__main__":
    main()
