"""Tables and chart of what `bench_peers.py` measured; it calls `renew`."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pages
from matplotlib.axes import Axes
from matplotlib.figure import Figure

OURS = "jaxrlhf"
NAMES = {OURS: "jaxrlhf", "trl": "TRL", "tunix": "Tunix"}
COLUMNS = {
    "step_s": "step s",
    "generate_s": "generate s",
    "prepare_s": "prepare s",
    "update_s": "update s",
    "generated_tokens_per_s": "tokens/s",
    "peak_rss_mb": "peak MB",
    "first_step_s": "first step s",
}
LABELS = {
    "fixed": "8 x 8, 64 + 128 tokens",
    "fixed512": "8 x 8, 64 + 512 tokens",
    "longtail": "16 x 8, lengths vary",
    "ppo": "PPO, 64 x 1, 64 + 128",
    "big": "387 M weights, 2 x 4, 64 + 64",
}
PARTS = {"generate_s": "#3b6fb6", "prepare_s": "#4d9a5b", "update_s": "#e07b39", "rest": "#8c8c8c"}

Measured = dict[str, Any]
"""docs/peers.json."""


@dataclass(frozen=True)
class Target:
    """A figure of ours over the better peer's that was aimed at; at least where more is better."""

    workload: str
    figure: str
    ratio: float

    @property
    def more(self) -> bool:
        """More is better."""
        return self.figure.endswith("_per_s")

    def better_peer(self, measured: Measured) -> tuple[str, float] | None:
        """Who and how much; None where no peer has the figure."""
        entry = measured.get(self.workload, {})
        found = [(each[self.figure], peer) for peer, each in entry.items() if peer != OURS and self.figure in each]
        if not found:
            return None
        amount, peer = max(found) if self.more else min(found)
        return peer, amount

    def reached(self, ratio: float) -> bool:
        """Whether a ratio is as good as the target's."""
        return ratio >= self.ratio if self.more else ratio <= self.ratio


TARGETS = (
    Target("fixed", "step_s", 0.55),
    Target("fixed", "generated_tokens_per_s", 2.5),
    Target("fixed", "peak_rss_mb", 0.5),
    Target("fixed512", "step_s", 0.45),
    Target("fixed512", "generated_tokens_per_s", 2.5),
    Target("longtail", "step_s", 0.2),
    Target("longtail", "peak_rss_mb", 0.5),
    Target("ppo", "step_s", 0.55),
    *(Target("big", figure, 1.0) for figure in ("step_s", "generate_s", "prepare_s", "update_s")),
)
FIRST_STEP_S = {
    "first_step_s": ("first step, nothing compiled", 25),
    "first_step_warm_s": ("again, from the cache", 12),
}


def workloads(measured: Measured) -> list[str]:
    """Those that were measured."""
    return [name for name in LABELS if name in measured]


def number(amount: float) -> str:
    """Three digits, and no exponent."""
    return f"{amount:.0f}" if amount >= 100 else f"{amount:.3g}"


def figures_table(measured: Measured) -> str:
    """Every figure of every framework."""
    lines = ["| workload | | " + " | ".join(COLUMNS.values()) + " |", "|---|---|" + "---|" * len(COLUMNS)]
    for workload in workloads(measured):
        for framework, name in NAMES.items():
            entry = measured[workload].get(framework)
            if entry is None:
                continue
            cells = [number(entry[column]) if column in entry else "" for column in COLUMNS]
            cells[0] = "failed" if "failed" in entry else cells[0]
            lines.append(f"| {LABELS[workload]} | {name} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", about(measured)])


def targets_table(measured: Measured) -> str:
    """Ours beside the better peer and the aim."""
    lines = ["| workload | figure | jaxrlhf | better peer | ratio | aim | |", "|---|---|---|---|---|---|---|"]
    for target in TARGETS:
        ours, peer = measured.get(target.workload, {}).get(OURS, {}), target.better_peer(measured)
        if target.figure not in ours or peer is None:
            continue
        ratio = ours[target.figure] / peer[1]
        aim = f"{'at least' if target.more else 'at most'} {target.ratio:g}"
        lines.append(
            f"| {LABELS[target.workload]} | {COLUMNS[target.figure]} | {number(ours[target.figure])} "
            f"| {number(peer[1])} ({NAMES[peer[0]]}) | {ratio:.2f} | {aim} | {_mark(target.reached(ratio))} |"
        )
    ours = measured.get("fixed", {}).get(OURS, {})
    for figure, (name, limit_s) in FIRST_STEP_S.items():
        if figure in ours:
            reached = _mark(ours[figure] <= limit_s)
            cells = f"{name}, s | {number(ours[figure])} | | | at most {limit_s:g} s | {reached}"
            lines.append(f"| {LABELS['fixed']} | {cells} |")
    return "\n".join(lines)


def _mark(reached: bool) -> str:
    return "reached" if reached else "missed"


def speed_table(measured: Measured) -> str:
    """Seconds of a step, in short."""
    lines = ["| seconds a step | " + " | ".join(NAMES.values()) + " | of the better peer |", "|---|---|---|---|---|"]
    for workload in workloads(measured):
        steps = {name: measured[workload].get(name, {}).get("step_s") for name in NAMES}
        peer = Target(workload, "step_s", 1.0).better_peer(measured)
        ratio = f"{steps[OURS] / peer[1]:.2f}" if steps[OURS] and peer else ""
        cells = [number(seconds) if seconds else "" for seconds in steps.values()]
        lines.append(f"| {LABELS[workload]} | " + " | ".join(cells) + f" | {ratio} |")
    return "\n".join([*lines, "", about(measured)])


def elsewhere_table(others: Sequence[Measured]) -> str:
    """Ours over the better peer on other machines, each in a column."""
    heads = [each["machine"]["processor"] for each in others]
    lines = ["| ours over the better peer | " + " | ".join(heads) + " |", "|---|" + "---|" * len(heads)]
    for target in TARGETS:
        cells = [_ratio(target, each) for each in others]
        lines.append(f"| {LABELS[target.workload]}: {COLUMNS[target.figure]} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", *(about(each) for each in others)])


def _ratio(target: Target, measured: Measured) -> str:
    ours, peer = measured.get(target.workload, {}).get(OURS, {}), target.better_peer(measured)
    if target.figure not in ours or peer is None:
        return ""
    ratio = ours[target.figure] / peer[1]
    return f"{ratio:.2f}, {_mark(target.reached(ratio))}"


def about(measured: Measured) -> str:
    """Where, when and with what."""
    versions = measured["versions"]
    names = (
        *(("trl", "trl", "TRL"), ("trl_ppo", "trl", "for PPO TRL"), ("trl", "torch", "torch")),
        *(("tunix", "google-tunix", "Tunix"), (OURS, "jax", "JAX")),
    )
    with_ = [f"{name} {versions[who][what]}" for who, what, name in names if what in versions.get(who, {})]
    runs = [len(kept) for name in workloads(measured) for kept in measured["runs"][name].values()]
    spread = f"{min(runs)}" if min(runs) == max(runs) else f"{min(runs)} to {max(runs)}"
    at: dict[str, list[str]] = {}
    for name in workloads(measured):
        for kept in measured["runs"][name].get(OURS, []):
            if name not in (measured_at := at.setdefault(kept["commit"], [])):
                measured_at.append(name)
    commits = ", ".join(f"`{commit}` for {' and '.join(names)}" for commit, names in at.items())
    return (
        f"{measured['machine']['processor']}, float32; {', '.join(with_)}; until {measured['date'][:10]}; ours at "
        f"commit {commits}; medians, runs of each: {spread}."
    )


def draw(measured: Measured, png: Path) -> None:
    """Bars of a step's seconds, split by phase; a panel for each workload."""
    names = workloads(measured)
    figure = Figure(figsize=(2.9 * len(names), 3.4), layout="constrained")
    for axes, workload in zip(figure.subplots(1, len(names), squeeze=False)[0], names, strict=True):
        _panel(axes, measured[workload])
        axes.set_title(LABELS[workload], fontsize=9)
    figure.axes[0].set_ylabel("seconds a step")
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(PARTS), frameon=False, fontsize=9)
    figure.savefig(png, dpi=130)


def _panel(axes: Axes, entry: dict[str, dict[str, float]]) -> None:
    shown = [name for name in NAMES if "step_s" in entry.get(name, {})]
    floor = [0.0] * len(shown)
    for part, color in PARTS.items():
        if part == "rest":
            heights = [max(0.0, entry[name]["step_s"] - low) for name, low in zip(shown, floor, strict=True)]
        else:
            heights = [entry[name][part] for name in shown]
        axes.bar(range(len(shown)), heights, 0.65, bottom=floor, color=color, label=part.removesuffix("_s"))
        floor = [low + height for low, height in zip(floor, heights, strict=True)]
    for index, name in enumerate(shown):
        axes.text(index, floor[index], number(entry[name]["step_s"]), ha="center", va="bottom", fontsize=9)
    axes.set_xticks(range(len(shown)), [NAMES[name] for name in shown], fontsize=9)
    axes.margins(y=0.12)
    axes.spines[["top", "right"]].set_visible(False)


def renew(docs: Path) -> None:
    """The chart, and the tables of the pages that are there; `peers_*.json` beside it are of other machines."""
    measured = json.loads((docs / "peers.json").read_text())
    others = [json.loads(path.read_text()) for path in sorted(docs.glob("peers_*.json"))]
    draw(measured, docs / "peers.png")
    elsewhere = {"elsewhere": elsewhere_table(others)} if others else {}
    parts = {
        docs / "benchmarks.md": {"peers": figures_table(measured), "targets": targets_table(measured), **elsewhere},
        docs.parent / "README.md": {"speed": speed_table(measured)},
    }
    for page, tables in parts.items():
        if page.exists():
            pages.renew(page, tables)
