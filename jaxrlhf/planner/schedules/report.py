"""Report of schedules: a table of their predictions, and a recommendation."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.table import Table
from rich.text import Text

from jaxrlhf.planner.plan import plan_to_json
from jaxrlhf.planner.report import LOOK, placement_text, seconds_text
from jaxrlhf.planner.schedules.predict import ScheduledPlan

_GAIN_WORTH_HAVING, _SHOWN = 1.02, 6


def schedules_table(scheduled: Sequence[ScheduledPlan]) -> Table:
    """Return a table of the synchronous schedule, then of the requested schedule on each placement."""
    table = Table(title="schedules, simulated", **LOOK)
    for heading in ("staleness", "placement"):
        table.add_column(heading)
    for heading in (
        "step s",
        "speedup",
        "generation idle",
        "learning idle",
        "slots used",
        "age",
        "max age",
        "recomputed",
    ):
        table.add_column(heading, justify="right")
    first = scheduled[0].prediction.step_s
    for one in scheduled[: 1 + _SHOWN]:
        result, schedule = one.prediction, one.schedule
        shares = (result.generation_idle, result.learning_idle, result.slots_in_use)
        more = f", over-provision {schedule.over_provision:g}" if schedule.over_provision > 1 else ""
        cells = [f"{schedule.staleness}{more}", placement_text(one.plan.pools)]
        cells += [seconds_text(result.step_s), f"{first / result.step_s:.2f}", *(f"{share:.0%}" for share in shares)]
        cells += [f"{result.age_mean:.2f}", str(result.age_max), f"{result.recomputed:.1%}"]
        table.add_row(*map(Text, cells))
    return table


def recommended(scheduled: Sequence[ScheduledPlan]) -> ScheduledPlan | None:
    """Return the fastest schedule and placement; None if no schedule is clearly faster than the synchronous one."""
    first, fastest = scheduled[0], min(scheduled, key=lambda one: one.prediction.step_s)
    return fastest if first.prediction.step_s >= _GAIN_WORTH_HAVING * fastest.prediction.step_s else None


def recommendation(scheduled: Sequence[ScheduledPlan]) -> str:
    """Return a sentence that recommends a schedule and its placement."""
    best, first = recommended(scheduled), scheduled[0].prediction
    if best is None:
        return "no schedule is faster than the synchronous one; set rollout.staleness=0"
    result = best.prediction
    return (
        f"{placement_text(best.plan.pools)} with staleness {best.schedule.staleness}: {seconds_text(result.step_s)} s "
        f"per step, {first.step_s / result.step_s:.2f} times as fast, mean age {result.age_mean:.2f} versions"
    )


def schedules_to_json(scheduled: Sequence[ScheduledPlan]) -> list[dict[str, Any]]:
    """Return schedules with plans and predictions as JSON data, without intervals."""
    rows = []
    for one in scheduled:
        result = {name: value for name, value in asdict(one.prediction).items() if name not in ("rounds", "updates")}
        rows.append(asdict(one.schedule) | result | {"plan": plan_to_json(one.plan)})
    return rows
