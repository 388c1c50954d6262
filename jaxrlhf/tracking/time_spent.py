"""Time spent by a run: seconds by call, and how long each pool waited."""

from collections.abc import Iterable, Sequence
from statistics import median
from typing import NamedTuple

from rich.table import Table
from rich.text import Text

from jaxrlhf.tracking.timeline import ON_HOST, Call, StepCalls

IDLE = "idle"
OUTSIDE = "outside steps"


class Spent(NamedTuple):
    """Seconds of one kind of call.

    Attributes:
      lane: See `Call`; the last lines are of the step, and of what ran outside of steps.
      name: `role.verb`, or what else the time was.
      calls: None for what is no call.
      share: Share of the time of all steps; None outside of them, and so are the next two.
      first_s: In the first step, which compiles.
      median_s: Median over the steady steps.
    """

    lane: str
    name: str
    calls: int | None
    seconds: float
    share: float | None = None
    first_s: float | None = None
    median_s: float | None = None


def steady(steps: Sequence[StepCalls]) -> Sequence[StepCalls]:
    """All but the first step of the process, which compiles; that one if it is alone."""
    return steps[1:] or steps


def typical(steps: Sequence[StepCalls]) -> StepCalls:
    """The steady step of median length."""
    ranked = sorted(steady(steps), key=lambda step: step.seconds)
    return ranked[(len(ranked) - 1) // 2]


def time_spent(steps: Sequence[StepCalls], outside: Sequence[Call], *, start_s: float, end_s: float) -> list[Spent]:
    """The lines of the table.

    A pool is idle while none of its calls runs. Pools overlap, so their seconds may add up to more than the steps'.

    Args:
      steps: Steps of this process, one at least.
      outside: Calls that ran before, between and after them.
      start_s: Start of the run.
      end_s: End of the run.
    """
    lines = []
    for lane in dict.fromkeys(call.lane for step in steps for call in step.calls):
        own = [[call for call in step.calls if call.lane == lane] for step in steps]
        for name in dict.fromkeys(_name(call) for calls in own for call in calls):
            named = [[call for call in calls if _name(call) == name] for calls in own]
            count = sum(len(calls) for calls in named)
            seconds = [sum(call.end_s - call.start_s for call in calls) for calls in named]
            lines.append(_in_steps(steps, lane, name, count, seconds))
        if lane == ON_HOST:
            continue
        idle = [
            step.seconds - _covered_s(_spans(calls), step.start_s, step.end_s)
            for step, calls in zip(steps, own, strict=True)
        ]
        lines.append(_in_steps(steps, lane, IDLE, None, idle))
    lines.append(_in_steps(steps, "step", "all", len(steps), [step.seconds for step in steps]))
    for name in dict.fromkeys(_name(call) for call in outside):
        found = [call for call in outside if _name(call) == name]
        lines.append(Spent(OUTSIDE, name, len(found), sum(call.end_s - call.start_s for call in found)))
    known = [*_spans(outside), *((step.start_s, step.end_s) for step in steps)]
    lines.append(Spent(OUTSIDE, "saving, logging", None, end_s - start_s - _covered_s(known, start_s, end_s)))
    return lines


def time_table(lines: Sequence[Spent], *, title: str, caption: str) -> Table:
    """The lines as a table; a lane is named once, and a blank line follows it."""
    table = Table(title=Text(title), caption=Text(caption), box=None, pad_edge=False, header_style="bold")
    table.title_justify = table.caption_justify = "left"
    for heading in ("pool", "call"):  # these wrap where it is narrow, and no number is cut
        table.add_column(heading, overflow="fold")
    for heading in ("calls", "seconds", "share", "first step", "median step"):
        table.add_column(heading, justify="right", no_wrap=True)
    for number, line in enumerate(lines):
        if first := number == 0 or lines[number - 1].lane != line.lane:
            table.add_row(*[""] * (7 if number else 0))
        count = "" if line.calls is None else f"{line.calls}"
        share = "" if line.share is None else f"{line.share:.1%}"
        cells = (line.lane if first else "", line.name, count, _text(line.seconds), share)
        table.add_row(*map(Text, (*cells, _text(line.first_s), _text(line.median_s))))
    return table


def _in_steps(steps: Sequence[StepCalls], lane: str, name: str, calls: int | None, by_step_s: Sequence[float]) -> Spent:
    total = sum(by_step_s)
    middle = median(by_step_s[-len(steady(steps)) :])
    return Spent(lane, name, calls, total, total / sum(step.seconds for step in steps), by_step_s[0], middle)


def _name(call: Call) -> str:
    return f"{call.role}.{call.verb}"


def _spans(calls: Iterable[Call]) -> list[tuple[float, float]]:
    return [(call.start_s, call.end_s) for call in calls]


def _covered_s(spans: Iterable[tuple[float, float]], start_s: float, end_s: float) -> float:
    """Seconds between start and end that lie in one of the spans at least."""
    covered_s, reached_s = 0.0, start_s
    for begin_s, stop_s in sorted(spans):
        begin_s, stop_s = max(begin_s, reached_s), min(stop_s, end_s)
        if stop_s > begin_s:
            covered_s += stop_s - begin_s
            reached_s = stop_s
    return covered_s


def _text(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds:.2f} s"
