"""Picture of one step: a line for each role, a bar for each call."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from jaxrlhf.tracking.plots import BLUE, GREEN, GREY, ORANGE, PURPLE, RED
from jaxrlhf.tracking.timeline import ON_HOST, StepCalls
from jaxrlhf.tracking.timeline_figure import Bar, timeline_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = (BLUE, ORANGE, PURPLE, RED, "#64b5cd", GREEN, "#d9b44a", "#da8bc3", GREY, "#937860")
"""Colors of the worker methods, in the order in which they first ran."""


class Lines(NamedTuple):
    """Lines of the picture from top to bottom, grouped by pool, and their bars."""

    names: list[str]
    bars: list[Bar]


def lines_of(step: StepCalls) -> Lines:
    """Lay out a step: pools and the roles on them in the order in which they first ran."""
    calls = sorted(step.calls, key=lambda call: call.start_s)
    lanes = list(dict.fromkeys(call.lane for call in calls))
    roles = dict.fromkeys((call.lane, call.role) for call in calls)
    lines = sorted(roles, key=lambda line: lanes.index(line[0]))
    bars = [
        Bar(lines.index((call.lane, call.role)), call.verb, call.start_s - step.start_s, call.end_s - call.start_s)
        for call in calls
    ]
    pools = {*lanes} - {ON_HOST}
    names = [role if len(pools) < 2 else f"{role}\n{lane}" for lane, role in lines]
    return Lines(names, bars)


def save_step_picture(step: StepCalls, png: Path | str, *, title: str) -> Path:
    """Draw a step into a PNG."""
    path = Path(png)
    draw_step(step, title=title).savefig(path, dpi=130)
    return path


def draw_step(step: StepCalls, *, title: str) -> Figure:
    """Draw the timeline of a step as a matplotlib figure."""
    names, bars = lines_of(step)
    verbs = list(dict.fromkeys(bar.verb for bar in bars))
    colours = {verb: COLOURS[index % len(COLOURS)] for index, verb in enumerate(verbs)}
    title = f"{title}: step {step.number} in {step.seconds:.3g} s"
    return timeline_figure(names, bars, seconds=step.seconds, title=title, colours=colours)
