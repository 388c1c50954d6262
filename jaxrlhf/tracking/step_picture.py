"""One step as a picture: a line for each role, a bar for each call."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from jaxrlhf.tracking.plots import BLUE, GREEN, GREY, ORANGE, PURPLE, RED
from jaxrlhf.tracking.timeline import ON_HOST, StepCalls

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = (BLUE, ORANGE, PURPLE, RED, "#64b5cd", GREEN, "#d9b44a", "#da8bc3", GREY, "#937860")
"""Colours of the worker methods, in the order in which they first ran."""


class Bar(NamedTuple):
    """A call as it is drawn; `start_s` counts from the start of the step."""

    line: int
    verb: str
    start_s: float
    length_s: float


class Lines(NamedTuple):
    """The lines of the picture from top to bottom, those of one pool together, and their bars."""

    names: list[str]
    bars: list[Bar]


def lines_of(step: StepCalls) -> Lines:
    """Lay out a step: pools and the roles on them in the order in which they first ran."""
    calls = sorted(step.calls, key=lambda call: call.start_s)
    lanes = list(dict.fromkeys(call.lane for call in calls))
    roles = dict.fromkeys((call.lane, call.role) for call in calls)
    places = sorted(roles, key=lambda place: lanes.index(place[0]))
    bars = [
        Bar(places.index((call.lane, call.role)), call.verb, call.start_s - step.start_s, call.end_s - call.start_s)
        for call in calls
    ]
    pools = {*lanes} - {ON_HOST}
    names = [role if len(pools) < 2 else f"{role}\n{lane}" for lane, role in places]
    return Lines(names, bars)


def save_step_picture(step: StepCalls, png: Path | str, *, title: str) -> Path:
    """Draw a step into a PNG."""
    path = Path(png)
    draw_step(step, title=title).savefig(path, dpi=130)
    return path


def draw_step(step: StepCalls, *, title: str) -> Figure:
    """Timeline of a step as a matplotlib figure."""
    from matplotlib.figure import Figure  # without pyplot, no backend is chosen and no state is kept
    from matplotlib.patches import Patch

    names, bars = lines_of(step)
    verbs = list(dict.fromkeys(bar.verb for bar in bars))
    colours = {verb: COLOURS[index % len(COLOURS)] for index, verb in enumerate(verbs)}
    figure = Figure(figsize=(11.0, 1.7 + 0.6 * len(names)), layout="constrained")
    figure.suptitle(f"{title}: step {step.number} in {step.seconds:.3g} s", x=0.01, ha="left", fontweight="bold")
    axes = figure.add_subplot()
    for bar in bars:
        # The edge keeps the shortest calls visible.
        axes.barh(bar.line, bar.length_s, left=bar.start_s, height=0.66, color=colours[bar.verb], ec=colours[bar.verb])
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_xlim(0, step.seconds)
    axes.set_xlabel("seconds")
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", alpha=0.25, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    patches = [Patch(color=colours[verb], label=verb) for verb in verbs]
    figure.legend(handles=patches, loc="outside lower center", ncols=min(5, len(verbs)), frameon=False, fontsize=9)
    return figure
