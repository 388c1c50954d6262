"""Tables and chart of the measurements of `compare_peers.py`, which calls `renew`."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from scripts import pages

OURS = "jaxrlhf"
NAMES = {OURS: "jaxrlhf", "trl": "TRL", "tunix": "Tunix"}
PEERS = [name for name in NAMES if name != OURS]
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
    "smollm2_grpo": "SmolLM2, GRPO, 8 x 4, 172 + 128 tokens",
    "smollm2_ppo": "SmolLM2, PPO, 32 x 1, 172 + 128",
    "smollm2_sft": "SmolLM2, SFT, 32 of 230",
    "smollm2_dpo": "SmolLM2, DPO, 16 pairs of 186",
    "fixed": "8 x 8, 64 + 128 tokens",
    "fixed512": "8 x 8, 64 + 512 tokens",
    "longtail": "16 x 8, lengths vary",
    "ppo": "PPO, 64 x 1, 64 + 128",
    "big": "387 M weights, 2 x 4, 64 + 64",
    "qwen": "494 M weights, 151 936 words, 2 x 4, 64 + 64",
}
STARTS = {
    "to_first_step_s": "first step",
    "to_third_step_s": "third step",
    "kept_to_first_step_s": "first, programs kept",
    "kept_to_third_step_s": "third, programs kept",
}
"""Figures of seconds from the command to the end of a step."""
PANELS = 5
"""Number of panels in a row of the chart."""
PARTS = {"generate_s": "#3b6fb6", "prepare_s": "#4d9a5b", "update_s": "#e07b39", "rest": "#8c8c8c"}

Measured = dict[str, Any]
"""Content of peers.json, or of the file of another machine."""
Shown = dict[str, Measured]
"""Measurements by workload."""


@dataclass(frozen=True)
class Target:
    """Target ratio of our figure to the better peer's: a minimum where more is better, else a maximum."""

    workload: str
    figure: str
    ratio: float

    @property
    def more(self) -> bool:
        """True if more is better."""
        return self.figure.endswith("_per_s")

    def better_peer(self, measured: Measured) -> tuple[str, float] | None:
        """Return the better peer and its figure, or None if no peer has the figure."""
        entry = measured.get(self.workload, {})
        found = [(each[self.figure], peer) for peer, each in entry.items() if peer != OURS and self.figure in each]
        if not found:
            return None
        amount, peer = max(found) if self.more else min(found)
        return peer, amount

    def reached(self, ratio: float) -> bool:
        """Return whether a ratio reaches the target."""
        return ratio >= self.ratio if self.more else ratio <= self.ratio


TARGETS = (
    *(Target(name, "step_s", 0.6) for name in ("smollm2_grpo", "smollm2_ppo")),
    *(Target(name, "update_s", 0.8) for name in ("smollm2_sft", "smollm2_dpo")),
    *(Target(name, "peak_rss_mb", 1.0) for name in ("smollm2_grpo", "smollm2_ppo", "smollm2_sft", "smollm2_dpo")),
    Target("fixed", "step_s", 0.55),
    Target("fixed", "generated_tokens_per_s", 2.5),
    Target("fixed", "peak_rss_mb", 0.5),
    Target("fixed512", "step_s", 0.45),
    Target("fixed512", "generated_tokens_per_s", 2.5),
    Target("longtail", "step_s", 0.2),
    Target("longtail", "peak_rss_mb", 0.5),
    Target("ppo", "step_s", 0.55),
    Target("qwen", "step_s", 0.65),
    *(Target("big", figure, 1.0) for figure in ("step_s", "generate_s", "prepare_s", "update_s")),
)
FIRST_STEP_S = {
    "first_step_s": ("first step, nothing compiled", 25),
    "first_step_warm_s": ("again, from the cache", 12),
}


def of_workloads(machines: Sequence[Measured]) -> Shown:
    """Return the measurements to show of each workload, from the first machine that measured the workload."""
    found = {name: [each for each in machines if name in each] for name in LABELS}
    return {name: measured[0] for name, measured in found.items() if measured}


def number(amount: float) -> str:
    """Format a number with three digits and no exponent."""
    return f"{amount:.0f}" if amount >= 100 else f"{amount:.3g}"


def figures_table(shown: Shown) -> str:
    """Return the table of all figures of all frameworks, and the table of seconds from the command on."""
    machine, cell_of = _machine_column(shown)
    lines = ["| workload | | " + " | ".join(COLUMNS.values()) + f" |{machine}", "|---|---|" + "---|" * len(COLUMNS)]
    lines[1] += "---|" if machine else ""
    for workload, framework, entry in _entries(shown):
        cells = [number(entry[column]) if column in entry else "" for column in COLUMNS]
        cells[0] = "not run" if "failed" in entry else cells[0]
        lines.append(f"| {LABELS[workload]} | {NAMES[framework]} | " + " | ".join(cells) + f" |{cell_of(workload)}")
    return "\n".join([*lines, "", *_starts(shown), *_failures(shown), *captions(shown)])


def _entries(shown: Shown) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for workload, measured in shown.items():
        for framework in NAMES:
            if framework in measured[workload]:
                yield workload, framework, measured[workload][framework]


def _machine_column(shown: Shown) -> tuple[str, Callable[[str], str]]:
    """Return head and cells of a column for the machine of each row, or empty strings if there is one machine."""
    names = {workload: measured["machine"]["processor"] for workload, measured in shown.items()}
    if len(set(names.values())) < 2:
        return "", lambda _: ""
    return " machine |", lambda workload: f" {names[workload]} |"


def _starts(shown: Shown) -> list[str]:
    """Return the table of seconds from the command to the end of the first and third step, where measured."""
    rows = []
    for workload, framework, entry in _entries(shown):
        if any(name in entry for name in STARTS):
            cells = [number(entry[name]) if name in entry else "" for name in STARTS]
            rows.append(f"| {LABELS[workload]} | {NAMES[framework]} | " + " | ".join(cells) + " |")
    heads = "| seconds from the command to the end of | | " + " | ".join(STARTS.values()) + " |"
    return [heads, "|---|---|" + "---|" * len(STARTS), *rows, ""] if rows else []


def _failures(shown: Shown) -> list[str]:
    """Return a sentence for each reason that workloads did not run."""
    reasons: dict[str, list[str]] = {}
    for workload, framework, entry in _entries(shown):
        if "failed" in entry:
            reasons.setdefault(f"{NAMES[framework]}: {entry['failed']}", []).append(f"`{workload}`")
    return [f"Not run: {', '.join(names)} by {reason}." for reason, names in reasons.items()] + [""] * bool(reasons)


def targets_table(measured: Measured) -> str:
    """Return the table of our figures, the better peer's figures and the targets."""
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


def speed_table(shown: Shown) -> str:
    """Return the short tables of seconds of a step, and from the command to the end of the third step."""
    machine, cell_of = _machine_column(shown)
    heads = "| seconds a step | " + " | ".join(NAMES.values()) + f" | of the better peer |{machine}"
    lines = [heads, "|---|---|---|---|---|" + ("---|" if machine else "")]
    for workload, measured in shown.items():
        steps = {name: measured[workload].get(name, {}).get("step_s") for name in NAMES}
        peer = Target(workload, "step_s", 1.0).better_peer(measured)
        ratio = f"{steps[OURS] / peer[1]:.2f}" if steps[OURS] and peer else ""
        cells = [number(seconds) if seconds else "" for seconds in steps.values()]
        lines.append(f"| {LABELS[workload]} | " + " | ".join(cells) + f" | {ratio} |{cell_of(workload)}")
    real = "SmolLM2 is a chat model of 135 M weights as it was published; other rows are models with random weights."
    about_models = [real, ""] if any(name.startswith("smollm2") for name in shown) else []
    return "\n".join([*lines, "", *_third_steps(shown), *about_models, *captions(shown)])


def _third_steps(shown: Shown) -> list[str]:
    """Return the table of seconds from the command to the end of the third step, where measured."""
    columns = [
        (OURS, "to_third_step_s"),
        (OURS, "kept_to_third_step_s"),
        *((name, "to_third_step_s") for name in PEERS),
    ]
    rows = []
    for workload, measured in shown.items():
        found = [measured[workload].get(name, {}).get(figure) for name, figure in columns]
        if any(found):
            rows.append(f"| {LABELS[workload]} | " + " | ".join(number(one) if one else "" for one in found) + " |")
    names = ["jaxrlhf", "jaxrlhf, programs kept", *(NAMES[name] for name in PEERS)]
    heads = "| seconds from the command to the end of the third step | " + " | ".join(names) + " |"
    return [heads, "|---|" + "---|" * len(columns), *rows, ""] if rows else []


def elsewhere_table(others: Sequence[Measured]) -> str:
    """Return the table of our figures over the better peer's on other machines, with a column for each machine."""
    heads = [each["machine"]["processor"] for each in others]
    lines = ["| ours over the better peer | " + " | ".join(heads) + " |", "|---|" + "---|" * len(heads)]
    for target in TARGETS:
        cells = [_ratio(target, each) for each in others]
        lines.append(f"| {LABELS[target.workload]}: {COLUMNS[target.figure]} | " + " | ".join(cells) + " |")
    aimed = {target.workload for target in TARGETS}
    return "\n".join(
        [*lines, "", *(about(each, [name for name in LABELS if name in aimed & {*each}]) for each in others)]
    )


def _ratio(target: Target, measured: Measured) -> str:
    ours, peer = measured.get(target.workload, {}).get(OURS, {}), target.better_peer(measured)
    if target.figure not in ours or peer is None:
        return ""
    ratio = ours[target.figure] / peer[1]
    return f"{ratio:.2f}, {_mark(target.reached(ratio))}"


def captions(shown: Shown) -> list[str]:
    """Return a sentence for each machine of a table, with blank lines between the sentences."""
    of_machine: dict[str, list[str]] = {}
    for workload, measured in shown.items():
        of_machine.setdefault(measured["machine"]["processor"], []).append(workload)
    found: list[str] = []
    for names in of_machine.values():
        found += [*([""] if found else []), about(shown[names[0]], names)]
    return found


def about(measured: Measured, names: Sequence[str]) -> str:
    """Return a sentence with machine, versions, date and commits of workloads."""
    versions, runs = measured["versions"], [measured["runs"][name] for name in names]
    packages = (
        *(("trl", "trl", "TRL"), ("trl_ppo", "trl", "for PPO TRL"), ("trl", "torch", "torch")),
        *(("tunix", "google-tunix", "Tunix"), (OURS, "jax", "JAX")),
    )
    with_ = [f"{name} {versions[who][what]}" for who, what, name in packages if what in versions.get(who, {})]
    counts = [len(kept) for each in runs for kept in each.values()]
    spread = f"{min(counts)}" if min(counts) == max(counts) else f"{min(counts)} to {max(counts)}"
    until = max(record["date"] for each in runs for kept in each.values() for record in kept)[:10]
    at: dict[str, list[str]] = {}
    for name, each in zip(names, runs, strict=True):
        for commit in dict.fromkeys(record["commit"] for record in each.get(OURS, [])):
            at.setdefault(commit, []).append(name)
    commits = "; ".join(f"{', '.join(named)}: commit `{commit}`" for commit, named in at.items())
    return (
        f"{measured['machine']['processor']}, float32; {', '.join(with_)}; until {until}. Ours: {commits}. Medians, "
        f"runs of each: {spread}."
    )


def draw(shown: Shown, png: Path) -> None:
    """Draw a step's seconds as bars, split by phase; a panel for each workload."""
    across = min(len(shown), PANELS)
    down = -(-len(shown) // PANELS)
    figure = Figure(figsize=(2.9 * across, 3.1 * down + 0.3), layout="constrained")
    panels = figure.subplots(down, across, squeeze=False).flatten()
    for axes, (workload, measured) in zip(panels, shown.items(), strict=False):
        _panel(axes, measured[workload])
        axes.set_title(LABELS[workload], fontsize=9)
    for axes in panels[len(shown) :]:
        axes.set_axis_off()
    for axes in panels[::across]:
        axes.set_ylabel("seconds a step")
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
            heights = [entry[name].get(part, 0.0) for name in shown]
        axes.bar(range(len(shown)), heights, 0.65, bottom=floor, color=color, label=part.removesuffix("_s"))
        floor = [low + height for low, height in zip(floor, heights, strict=True)]
    for index, name in enumerate(shown):
        axes.text(index, floor[index], number(entry[name]["step_s"]), ha="center", va="bottom", fontsize=9)
    axes.set_xticks(range(len(shown)), [NAMES[name] for name in shown], fontsize=9)
    axes.margins(y=0.12)
    axes.spines[["top", "right"]].set_visible(False)


def renew(results: Path, docs: Path) -> None:
    """Renew the chart, and the tables of pages that exist, from peers.json and from `peers_*.json` of other machines.

    A table shows a workload from the first machine that measured it; peers.json comes first.
    """
    files = [path for path in (results / "peers.json", *sorted(results.glob("peers_*.json"))) if path.exists()]
    first, *others = machines = [json.loads(path.read_text()) for path in files]
    shown = of_workloads(machines)
    draw(shown, docs / "peers.png")
    aimed = {target.workload for target in TARGETS}
    compared = [each for each in others if aimed & {*each}]
    elsewhere = {"elsewhere": elsewhere_table(compared)} if compared else {}
    parts = {
        docs / "benchmarks.md": {"peers": figures_table(shown), "targets": targets_table(first), **elsewhere},
        docs.parent / "README.md": {"speed": speed_table(shown)},
    }
    for page, tables in parts.items():
        if page.exists():
            pages.renew(page, tables)
