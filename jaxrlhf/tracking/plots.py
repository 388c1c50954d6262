"""Learning curve: one picture of a run from its `metrics.jsonl`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxrlhf.config import Refusal
from jaxrlhf.tracking.records import read_records

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# step -> value of one metric, without the steps that lack the metric
Series = dict[int, float]
Curves = Mapping[str, Series]

TIMES = {
    "time/generate_s": "generate",
    "time/reward_s": "rewards",
    "time/prepare_s": "prepare",
    "time/update_s": "update",
    "time/relayout_s": "re-layout",
}
BLUE, ORANGE, GREEN, RED, PURPLE, GREY = "#3b6fb6", "#e07b39", "#4d9a5b", "#c44e52", "#8172b3", "#8c8c8c"


def save_learning_curve(metrics: Path | str, png: Path | str, *, title: str | None = None) -> Path:
    """Draw the learning curve of a `metrics.jsonl` into a PNG; panels without data are left out.

    Raises:
      Refusal: The file has no metrics of any panel.
    """
    path = Path(png)
    draw_learning_curve(metrics, title=title).savefig(path, dpi=130)
    return path


def draw_learning_curve(metrics: Path | str, *, title: str | None = None) -> Figure:
    """Draw the learning curve as a matplotlib figure."""
    from matplotlib.figure import Figure  # unlike pyplot, it chooses no backend and keeps no state
    from matplotlib.ticker import MaxNLocator

    curves = read_curves(metrics)
    panels = [panel for panel, names in PANELS.items() if any(name in curves for name in names)][:6]
    if not panels:
        raise Refusal(f"{metrics} has no metrics to plot; it has {', '.join(sorted(curves)) or 'no numbers'}")
    steps = sorted(set().union(*curves.values()))
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(4.6 * columns, 3.2 * rows), layout="constrained")
    if title:
        figure.suptitle(title, fontsize=12, fontweight="bold", parse_math=False)
    for position, panel in enumerate(panels, start=1):
        axes = figure.add_subplot(rows, columns, position)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25, linewidth=0.6)
        axes.set_xlabel("step")
        panel(axes, curves)
        axes.set_xlim(steps[0] - 1, steps[-1] + 0.02 * len(steps))
        axes.xaxis.set_major_locator(MaxNLocator(nbins=7, integer=True))
    return figure


def read_curves(metrics: Path | str) -> dict[str, Series]:
    """Return each metric's finite values by step; `eval/accuracy_at_start` counts as the accuracy one step earlier."""
    curves: dict[str, Series] = {}
    for record in read_records(metrics):
        if (start := record.pop("eval/accuracy_at_start", None)) is not None:
            curves.setdefault("eval/accuracy", {})[record["step"] - 1] = start
        for name, value in record.items():
            if name != "step" and isinstance(value, int | float):
                curves.setdefault(name, {})[record["step"]] = value
    return curves


def _line(axes: Axes, curves: Curves, name: str, label: str, colour: str, **style: Any) -> None:
    series = curves.get(name)
    if not series:
        return
    if len(series) == 1:
        style = {"marker": "o", **style}
    axes.plot(list(series), list(series.values()), label=label, color=colour, **{"linewidth": 1.5, **style})


def _legend(axes: Axes) -> None:
    if len(axes.get_lines()) > 1:
        axes.legend(fontsize=8, framealpha=0.8)


def _right(axes: Axes, curves: Curves, name: str, label: str, colour: str) -> None:
    """Add a second axis for a fraction, if there are data; both axes then have the colors of their lines."""
    if name not in curves:
        return
    right = axes.twinx()
    right.spines["top"].set_visible(False)
    _line(right, curves, name, label, colour, linestyle="--", linewidth=1.2)
    right.set_ylabel(label)
    right.set_ylim(0, max(0.05, 1.1 * max(curves[name].values())))
    for each in (axes, right):
        line = each.get_lines()[0]
        each.yaxis.label.set_color(line.get_color())
        each.tick_params(axis="y", labelcolor=line.get_color())


def _draw_score(axes: Axes, curves: Curves) -> None:
    axes.set_title("Score and accuracy")
    _line(axes, curves, "score/mean", "mean score (training)", BLUE)
    _line(axes, curves, "eval/accuracy", "accuracy (held-out)", ORANGE, marker="o", markersize=3.5)
    axes.set_ylabel("score, accuracy")
    _legend(axes)


def _draw_length(axes: Axes, curves: Curves) -> None:
    axes.set_title("Response length")
    _line(axes, curves, "response/length_mean", "mean length", BLUE)
    axes.set_ylabel("tokens")
    _right(axes, curves, "response/truncated_fraction", "truncated fraction", RED)


def _draw_kl(axes: Axes, curves: Curves) -> None:
    axes.set_title("KL to the reference policy")
    _line(axes, curves, "kl/ref", "KL", PURPLE)
    axes.set_ylabel("nats per token")


def _draw_entropy(axes: Axes, curves: Curves) -> None:
    axes.set_title("Policy")
    _line(axes, curves, "policy/entropy", "entropy", GREEN)
    axes.set_ylabel("entropy, nats per token")
    _right(axes, curves, "policy/clip_fraction", "clip fraction", GREY)


def _draw_gap(axes: Axes, curves: Curves) -> None:
    axes.set_title("Sampler against trainer")
    _line(axes, curves, "sampler/logp_gap_max", "largest", RED)
    _line(axes, curves, "sampler/logp_gap_mean", "mean", BLUE)
    axes.set_ylabel("|difference of logp|, nats")
    if any(gap > 0 for name in GAPS for gap in curves.get(name, {}).values()):
        axes.set_yscale("log")
    _legend(axes)


def _draw_times(axes: Axes, curves: Curves) -> None:
    axes.set_title("Time of a step")
    present = {label: curves[name] for name, label in TIMES.items() if name in curves}
    steps = sorted(set().union(*present.values()))
    edges = [steps[0] - 1, *steps]
    below = [0.0] * len(steps)
    for (label, series), colour in zip(present.items(), (BLUE, ORANGE, PURPLE, GREEN, GREY), strict=False):
        top = [seconds + series.get(step, 0.0) for step, seconds in zip(steps, below, strict=True)]
        axes.stairs(top, edges, baseline=below, fill=True, color=colour, alpha=0.85, label=label)
        below = top
    # Steps that compile take many times as long and would flatten all other steps.
    usual = sorted(below)[len(below) // 2]
    axes.set_ylim(0, min(1.1 * max(below), 2.5 * usual) or 1.0)
    axes.set_ylabel("seconds")
    axes.legend(fontsize=8, frameon=False, reverse=True, loc="center left", bbox_to_anchor=(1.0, 0.5))


def _draw_loss(axes: Axes, curves: Curves) -> None:
    axes.set_title("Loss")
    losses = [name for name in LOSSES if name in curves]
    for name, colour in zip(losses, (BLUE, ORANGE, GREEN), strict=False):
        _line(axes, curves, name, name.removesuffix("/loss"), colour)
    axes.set_ylabel("loss")
    _legend(axes)


GAPS = ("sampler/logp_gap_mean", "sampler/logp_gap_max")
LOSSES = ("supervised/loss", "actor/loss", "value/loss")
# The first six panels with data are drawn.
PANELS: Mapping[Callable[[Axes, Curves], None], tuple[str, ...]] = {
    _draw_score: ("score/mean", "eval/accuracy"),
    _draw_length: ("response/length_mean",),
    _draw_kl: ("kl/ref",),
    _draw_entropy: ("policy/entropy",),
    _draw_gap: GAPS,
    _draw_times: tuple(TIMES),
    _draw_loss: LOSSES,
}
