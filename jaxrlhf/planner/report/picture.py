"""The timeline of a plan as a picture: a lane for each pool, a bar for each call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from jaxrlhf.planner.plan import PlacementPlan, PlannedCall
from jaxrlhf.planner.report.report import critical_calls, seconds_text
from jaxrlhf.planner.workload import STAGES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS: Mapping[str, str] = {
    "generate": "#3b6fb6",
    "infer": "#e0a030",
    "update": "#4d9a5b",
    "switch": "#c44e52",
    "move": "#8172b3",
    "offload": "#8c8c8c",
}
"""Colour of each verb."""

_WIDTH_IN, _LANES_WIDE_IN, _LANE_IN = 11.0, 9.4, 0.95
_BAR, _CHARACTER_IN = 0.66, 0.075
_NARROWEST = 0.0025
"""Share of the whole width: what is shorter is drawn this wide, so that it can be seen."""


@dataclass(frozen=True)
class CallBar:
    """A call as it is drawn.

    Attributes:
      start_s: From the beginning of the step.
    """

    call: PlannedCall
    start_s: float

    @property
    def end_s(self) -> float:
        return self.start_s + self.call.cost.seconds


def save_timeline(plan: PlacementPlan, png: Path | str, *, title: str) -> Path:
    """Draw one step into a PNG."""
    path = Path(png)
    draw_timeline(plan, title=title).savefig(path, dpi=130)
    return path


def bars_of(plan: PlacementPlan) -> list[CallBar]:
    """When each call runs: stages one after another, and in a stage the calls of a pool.

    Where pools share processors the calls of all pools run one after another.
    """
    bars, begins_s = [], 0.0
    for stage in STAGES:
        calls = [call for call in plan.calls if call.stage == stage]
        in_turn = len(critical_calls(plan, stage)) == len(calls)
        ends_s = dict.fromkeys(range(len(plan.pools)), begins_s)
        for call in calls:
            lane = 0 if in_turn else call.pool
            bars.append(CallBar(call, ends_s[lane]))
            ends_s[lane] += call.cost.seconds
        begins_s += plan.stage_seconds.get(stage, 0.0)
    return bars


def draw_timeline(plan: PlacementPlan, *, title: str) -> Figure:
    """Timeline of one step as a matplotlib figure."""
    from matplotlib.figure import Figure  # without pyplot, no backend is chosen and no state is kept
    from matplotlib.patches import Patch

    lanes = len(plan.pools)
    figure = Figure(figsize=(_WIDTH_IN, 1.95 + _LANE_IN * lanes), layout="constrained")
    axes = figure.add_subplot()
    figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold")
    stages = ", ".join(f"{stage} {seconds_text(plan.stage_seconds.get(stage, 0.0))} s" for stage in STAGES)
    summary = f"one step in {seconds_text(plan.seconds)} s, as predicted: {stages}"
    axes.set_title(summary, loc="left", fontsize=9.5, color="#333333", pad=20)
    bars = bars_of(plan)
    _draw_stages(axes, plan)
    for lane in range(lanes):
        _draw_lane(axes, [bar for bar in bars if bar.call.pool == lane], lane, plan.seconds)
    axes.set_xlim(0, plan.seconds * 1.004)
    axes.set_ylim(lanes - 0.5, -0.5)
    axes.set_yticks(range(lanes), [f"{_lines(pool.roles)}\n{_devices(pool.devices)}" for pool in plan.pools])
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("seconds")
    axes.spines[["top", "right", "left"]].set_visible(False)
    present = [verb for verb in COLOURS if any(call.verb == verb for call in plan.calls)]
    patches = [Patch(color=COLOURS[verb], label=verb) for verb in present]
    if lanes > 1:
        patches.append(Patch(facecolor="white", edgecolor="#b0b0b0", hatch="////", label="waits"))
    figure.legend(handles=patches, loc="outside lower center", ncols=len(patches), frameon=False, fontsize=9)
    return figure


def _draw_stages(axes: Axes, plan: PlacementPlan) -> None:
    """A background for each stage, with its name above, where there is room for it."""
    begins_s = 0.0
    for index, stage in enumerate(STAGES):
        seconds = plan.stage_seconds.get(stage, 0.0)
        axes.axvspan(begins_s, begins_s + seconds, color="#f1f1f1" if index % 2 == 0 else "#ffffff", zorder=0, lw=0)
        if begins_s:
            axes.axvline(begins_s, color="#b0b0b0", linewidth=0.8, zorder=1)
        if _fits(stage, seconds / plan.seconds):
            top, place = (begins_s + seconds / 2, 1.0), axes.get_xaxis_transform()
            axes.annotate(
                stage, top, (0, 4), place, "offset points", ha="center", va="bottom", fontsize=9, color="#555555"
            )
        begins_s += seconds


def _draw_lane(axes: Axes, bars: list[CallBar], lane: int, total_s: float) -> None:
    """The calls of one pool, over a hatched strip that shows where it waits."""
    axes.barh(lane, total_s, height=_BAR, color="white", edgecolor="#c8c8c8", hatch="////", linewidth=0, zorder=1.5)
    for bar in bars:
        seconds = bar.call.cost.seconds
        axes.barh(
            lane,
            max(seconds, _NARROWEST * total_s),
            left=bar.start_s,
            height=_BAR,
            color=COLOURS[bar.call.verb],
            edgecolor="white",
            linewidth=0.5 if seconds > 4 * _NARROWEST * total_s else 0.0,
            zorder=3 if seconds < _NARROWEST * total_s else 2,
        )
        label, rotation = _label(bar.call, seconds / total_s)
        middle = bar.start_s + seconds / 2
        axes.text(
            middle, lane, label, rotation=rotation, ha="center", va="center", color="white", fontsize=8.5, zorder=4
        )


def _label(call: PlannedCall, share: float) -> tuple[str, int]:
    """Text on a bar of a share of the width, and how far it is turned; as much as there is room for."""
    for text in (f"{call.role}\n{seconds_text(call.cost.seconds)} s", call.role):
        if _fits(text.partition("\n")[0], share) and _fits(text.partition("\n")[2], share):
            return text, 0
    upright = share * _LANES_WIDE_IN > 2 * _CHARACTER_IN and len(call.role) * _CHARACTER_IN < 1.1 * _BAR * _LANE_IN
    return (call.role, 90) if upright else ("", 0)


def _fits(text: str, share: float) -> bool:
    """Return whether a text has room in a share of the width."""
    return (len(text) + 1) * _CHARACTER_IN < share * _LANES_WIDE_IN


def _lines(roles: tuple[str, ...]) -> str:
    """Role names, two to a line."""
    return "\n".join(" + ".join(roles[start : start + 2]) for start in range(0, len(roles), 2))


def _devices(count: int) -> str:
    return f"{count} device{'s' if count != 1 else ''}"
