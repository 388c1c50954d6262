"""Time table of a run: seconds by call, and idle seconds of each pool."""

from collections.abc import Iterable, Sequence
from statistics import median
from typing import NamedTuple

from rich.table import Table
from rich.text import Text

from jaxrlhf.tracking.timeline import ON_HOST, Call, StepCalls

IDLE = "idle"
OUTSIDE = "outside steps"


class Spent(NamedTuple):
    """Line of the time table: the seconds of one kind of call.

    Attributes:
      lane: Pool, as in `Call`; the last lines have `step` for whole steps, and `OUTSIDE` for time outside of steps.
      name: `role.verb`, or the kind of time if there is no call.
      calls: Number of calls; None for time without calls.
      share: Share of the time of all steps; None outside of steps, as are `first_s` and `median_s`.
      first_s: Seconds in the first step, which compiles.
      median_s: Median of the seconds in the steady steps.
    """

    lane: str
    name: str
    calls: int | None
    seconds: float
    share: float | None = None
    first_s: float | None = None
    median_s: float | None = None


def steady(steps: Sequence[StepCalls]) -> Sequence[StepCalls]:
    """Return all steps but the first step of the process, which compiles; a single step is returned as it is."""
    return steps[1:] or steps


def typical(steps: Sequence[StepCalls]) -> StepCalls:
    """Return the steady step of median length."""
    ranked = sorted(steady(steps), key=lambda step: step.seconds)
    return ranked[(len(ranked) - 1) // 2]


def time_spent(
    steps: Sequence[StepCalls], outside: Sequence[Call], *, start_s: float, ready_s: float, end_s: float
) -> list[Spent]:
    """Compute the lines of the table of times.

    A pool is idle while none of its calls runs. Pools overlap, so the sum of their seconds may exceed the steps' time.

    Args:
      steps: Steps of this process, at least one.
      outside: Calls that ran before, between and after the steps.
      start_s: Start of the run, before data and models are read.
      ready_s: End of the preparations, after which roles are called.
      end_s: End of the run.
    """
    lines = []
    for lane in dict.fromkeys(call.lane for step in steps for call in step.calls):
        by_step = [[call for call in step.calls if call.lane == lane] for step in steps]
        for name in dict.fromkeys(_name(call) for calls in by_step for call in calls):
            named = [[call for call in calls if _name(call) == name] for calls in by_step]
            count = sum(len(calls) for calls in named)
            seconds = [sum(call.end_s - call.start_s for call in calls) for calls in named]
            lines.append(_in_steps(steps, lane, name, count, seconds))
        if lane == ON_HOST:
            continue
        idle = [
            step.seconds - _covered_s(_spans(calls), step.start_s, step.end_s)
            for step, calls in zip(steps, by_step, strict=True)
        ]
        lines.append(_in_steps(steps, lane, IDLE, None, idle))
    lines.append(_in_steps(steps, "step", "all", len(steps), [step.seconds for step in steps]))
    lines.append(Spent(OUTSIDE, "reading data and models", None, ready_s - start_s))
    for name in dict.fromkeys(_name(call) for call in outside):
        calls = [call for call in outside if _name(call) == name]
        lines.append(Spent(OUTSIDE, name, len(calls), sum(call.end_s - call.start_s for call in calls)))
    known = [*_spans(outside), *((step.start_s, step.end_s) for step in steps)]
    lines.append(Spent(OUTSIDE, "saving, logging", None, end_s - ready_s - _covered_s(known, ready_s, end_s)))
    return lines


def time_table(lines: Sequence[Spent], *, title: str, caption: str) -> Table:
    """Format the lines as a table; a lane is named once, and a blank line follows the lane."""
    table = Table(title=Text(title), caption=Text(caption), box=None, pad_edge=False, header_style="bold")
    table.title_justify = table.caption_justify = "left"
    for heading in ("pool", "call"):  # these columns wrap if the table is narrow; numbers are not truncated
        table.add_column(heading, overflow="fold")
    for heading in ("calls", "seconds", "share", "first step", "median step"):
        table.add_column(heading, justify="right", no_wrap=True)
    for number, line in enumerate(lines):
        if first := number == 0 or lines[number - 1].lane != line.lane:
            table.add_row(*[""] * (7 if number else 0))
        count = "" if line.calls is None else f"{line.calls}"
        share = "" if line.share is None else f"{line.share:.1%}"
        cells = (line.lane if first else "", line.name, count, _seconds(line.seconds), share)
        table.add_row(*map(Text, (*cells, _seconds(line.first_s), _seconds(line.median_s))))
    return table


def _in_steps(steps: Sequence[StepCalls], lane: str, name: str, calls: int | None, by_step_s: Sequence[float]) -> Spent:
    total = sum(by_step_s)
    median_s = median(by_step_s[-len(steady(steps)) :])
    return Spent(lane, name, calls, total, total / sum(step.seconds for step in steps), by_step_s[0], median_s)


def _name(call: Call) -> str:
    return f"{call.role}.{call.verb}"


def _spans(calls: Iterable[Call]) -> list[tuple[float, float]]:
    return [(call.start_s, call.end_s) for call in calls]


def _covered_s(spans: Iterable[tuple[float, float]], start_s: float, end_s: float) -> float:
    """Return the seconds between start and end that at least one of the spans covers."""
    covered_s, reached_s = 0.0, start_s
    for first_s, last_s in sorted(spans):
        first_s, last_s = max(first_s, reached_s), min(last_s, end_s)
        if last_s > first_s:
            covered_s += last_s - first_s
            reached_s = last_s
    return covered_s


def _seconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds:.2f} s"
