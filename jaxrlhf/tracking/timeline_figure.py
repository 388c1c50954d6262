"""Timeline of a step as a figure: a line for each role or pool, a bar for each call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WIDTH_IN, BAR_HEIGHT = 11.0, 0.66
_MIN_LENGTH = 0.0025
"""Length of the shortest bar as a share of the step; shorter calls are drawn this long, so that they can be seen."""


class Bar(NamedTuple):
    """Bar of one call; `start_s` counts from the start of the step."""

    line: int
    verb: str
    start_s: float
    length_s: float


def timeline_figure(
    names: Sequence[str],
    bars: Sequence[Bar],
    *,
    seconds: float,
    title: str,
    colours: Mapping[str, str],
    line_in: float = 0.6,
    waits: bool = False,
) -> Figure:
    """Draw a timeline as a matplotlib figure with one axes.

    Args:
      names: Labels of the lines, from top to bottom.
      seconds: Length of the step.
      colours: Color of each verb, in the order of the legend.
      line_in: Height of a line in inches.
      waits: True to hatch the lines where they have no bar.
    """
    from matplotlib.figure import Figure  # unlike pyplot, it chooses no backend and keeps no state
    from matplotlib.patches import Patch

    figure = Figure(figsize=(WIDTH_IN, 1.7 + line_in * len(names)), layout="constrained")
    figure.suptitle(title, x=0.01, ha="left", fontweight="bold", parse_math=False)
    axes = figure.add_subplot()
    hatched: dict[str, Any] = {"facecolor": "white", "edgecolor": "#c8c8c8", "hatch": "////"}
    if waits:
        axes.barh(range(len(names)), seconds, height=BAR_HEIGHT, linewidth=0, zorder=1.5, **hatched)
    min_s = _MIN_LENGTH * seconds
    for bar in bars:
        look: dict[str, Any] = {
            "color": colours[bar.verb],
            "edgecolor": "white",
            "linewidth": 0.5 * (bar.length_s > 4 * min_s),
        }
        length, zorder = max(bar.length_s, min_s), 3 if bar.length_s < min_s else 2
        axes.barh(bar.line, length, left=bar.start_s, height=BAR_HEIGHT, zorder=zorder, **look)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_xlim(0, seconds)
    axes.set_xlabel("seconds")
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", alpha=0.25, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    present = {bar.verb for bar in bars}
    patches = [Patch(color=colour, label=verb) for verb, colour in colours.items() if verb in present]
    patches += [Patch(label="waits", **hatched)] if waits else []
    figure.legend(handles=patches, loc="outside lower center", ncols=min(7, len(patches)), frameon=False, fontsize=9)
    return figure
