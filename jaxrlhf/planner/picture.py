"""Timeline picture of a plan: a line for each pool, a bar for each call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from jaxrlhf.planner.plan import PlacementPlan, PlannedCall
from jaxrlhf.planner.report import critical_calls, seconds_text
from jaxrlhf.planner.workload import STAGES
from jaxrlhf.tracking.plots import BLUE, GREEN, GREY, PURPLE, RED
from jaxrlhf.tracking.timeline_figure import BAR_HEIGHT, WIDTH_IN, Bar, timeline_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = {"generate": BLUE, "infer": "#e0a030", "update": GREEN, "switch": RED, "move": PURPLE, "offload": GREY}
_LINE_IN, _CHARACTER_IN = 0.95, 0.075
_LINES_WIDE_IN = WIDTH_IN - 1.6  # without labels


class CallBar(NamedTuple):
    """Call and its start, in seconds from the start of the step."""

    call: PlannedCall
    start_s: float

    @property
    def end_s(self) -> float:
        """End of the call, in seconds from the start of the step."""
        return self.start_s + self.call.cost.seconds


def bars_of(plan: PlacementPlan) -> list[CallBar]:
    """Return the start of each call: stages run one after another, and so do a stage's calls on one pool.

    If pools take turns, all calls of a stage run one after another.
    """
    bars, begins_s = [], 0.0
    for stage in STAGES:
        calls = [call for call in plan.calls if call.stage == stage]
        in_turn = len(critical_calls(plan, stage)) == len(calls)
        ends_s = dict.fromkeys(range(len(plan.pools)), begins_s)
        for call in calls:
            line = 0 if in_turn else call.pool
            bars.append(CallBar(call, ends_s[line]))
            ends_s[line] += call.cost.seconds
        begins_s += plan.stage_seconds.get(stage, 0.0)
    return bars


def draw_timeline(plan: PlacementPlan, *, title: str) -> Figure:
    """Draw the timeline of one step as a matplotlib figure."""
    calls = bars_of(plan)
    bars = [Bar(call.pool, call.verb, start_s, call.cost.seconds) for call, start_s in calls]
    names = [f"{_lines(pool.roles)}\n{pool.devices} device{'s' * (pool.devices != 1)}" for pool in plan.pools]
    figure = timeline_figure(
        names, bars, seconds=plan.seconds, title=title, colours=COLOURS, line_in=_LINE_IN, waits=len(names) > 1
    )
    [axes] = figure.axes
    stages = ", ".join(f"{stage} {seconds_text(plan.stage_seconds.get(stage, 0.0))} s" for stage in STAGES)
    summary = f"one step in {seconds_text(plan.seconds)} s, as predicted: {stages}"
    axes.set_title(summary, loc="left", fontsize=9.5, color="#333333", pad=20)
    _draw_stages(axes, plan)
    for call, start_s in calls:
        text, rotation = _label(call, call.cost.seconds / plan.seconds)
        look: dict[str, Any] = {"color": "white", "fontsize": 8.5, "zorder": 4, "rotation": rotation}
        axes.text(start_s + call.cost.seconds / 2, call.pool, text, ha="center", va="center", **look)
    return figure


def _draw_stages(axes: Axes, plan: PlacementPlan) -> None:
    """Draw a background for each stage, with the stage's name above if there is room."""
    begins_s = 0.0
    for index, stage in enumerate(STAGES):
        seconds = plan.stage_seconds.get(stage, 0.0)
        axes.axvspan(begins_s, begins_s + seconds, color="#ffffff" if index % 2 else "#f1f1f1", zorder=0, lw=0)
        if _fits(stage, seconds / plan.seconds):
            look: dict[str, Any] = {"fontsize": 9, "color": "#555555", "transform": axes.get_xaxis_transform()}
            axes.text(begins_s + seconds / 2, 1.02, stage, ha="center", va="bottom", **look)
        begins_s += seconds


def _label(call: PlannedCall, share: float) -> tuple[str, int]:
    """Return the text on a bar, as much as there is room for, and its rotation in degrees.

    Args:
      share: Length of the bar as a share of the step.
    """
    seconds = f"{seconds_text(call.cost.seconds)} s"
    if _fits(call.role, share):
        return (f"{call.role}\n{seconds}" if _fits(seconds, share) else call.role), 0
    high = len(call.role) * _CHARACTER_IN < 1.1 * BAR_HEIGHT * _LINE_IN
    return (call.role, 90) if high and share * _LINES_WIDE_IN > 2 * _CHARACTER_IN else ("", 0)


def _fits(text: str, share: float) -> bool:
    """Return whether a text fits into a share of the step's width."""
    return (len(text) + 1) * _CHARACTER_IN < share * _LINES_WIDE_IN


def _lines(roles: tuple[str, ...]) -> str:
    """Return the role names as text, two per line."""
    return "\n".join(" + ".join(roles[start : start + 2]) for start in range(0, len(roles), 2))
