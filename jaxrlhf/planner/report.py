"""Report of a search in tables and sentences: the best plans, where their seconds go, and why others lost."""

from collections.abc import Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from jaxrlhf.config import ROLLOUT, Config, Layout
from jaxrlhf.planner.hardware import Hardware
from jaxrlhf.planner.plan import PARTS, Cost, PlacementPlan, PlannedCall, PlannedPool, SearchResult
from jaxrlhf.planner.workload import STAGES, Stage

_GIB, _NAMED = 2**30, 3
LOOK: dict[str, Any] = {"title_justify": "left", "box": None, "pad_edge": False, "header_style": "bold"}
"""Look of a table."""


def report(search: SearchResult, hardware: Hardware, notes: Sequence[str], *, shown: int = 5) -> RenderableType:
    """Whole report, best plan first."""
    best, *others = search.plans
    plans = search.plans[:shown]
    waits = [
        Text(f"plan {rank}: what is not in use waits in host memory, of {', '.join(plan.offload)}")
        for rank, plan in enumerate(plans, start=1)
        if plan.offload
    ]
    waits += [Text()] * bool(waits)
    rows: list[RenderableType] = [plans_table(plans, hardware), *waits, calls_table(best), Text()]
    rows += [Text(f"{call.role} {call.verb}: {call.note}") for call in best.calls if call.note]
    rows += [Text(), Text(why_it_lost(others[0], best)), Text()] if others else [Text()]
    idle = hardware.devices - sum(pool.devices for pool in best.pools)
    rows += [Text(f"{idle} of {hardware.devices} devices are left over: with them no plan is faster")] if idle else []
    extent = f"{search.placements} placements, {search.allocations} allocations and {search.simulated} layouts"
    rows += [Text(f"searched {extent} in {search.seconds:.2f} s")]
    rows += [Text(f"note: {note}", style="dim") for note in notes]
    return Group(*rows)


def plans_table(plans: Sequence[PlacementPlan], hardware: Hardware) -> Table:
    """One line for each plan, and one below it for each further pool."""
    table = Table(title=f"{hardware.devices} devices: {machines(hardware)}", **LOOK)
    for heading in ("", "placement"):
        table.add_column(heading)
    table.add_column("p-t-d x fsdp", no_wrap=True)
    for heading in ("p_g-t_g", *STAGES, "step s", "peak GiB"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("bottleneck")
    for rank, plan in enumerate(plans, start=1):
        for index, pool in enumerate(plan.pools):
            first, last = index == 0, index + 1 == len(plan.pools)
            seconds = [seconds_text(plan.stage_seconds.get(stage, 0.0)) if first else "" for stage in STAGES]
            total, limit = (seconds_text(plan.seconds), bottleneck(plan)) if first else ("", "")
            where = f"{' + '.join(pool.roles)} {pool.devices}{'' if last else ' |'}"  # may be broken at the blanks
            peak = f"{pool.peak_bytes / _GIB:.1f}"
            cells = [str(rank) if first else "", where, _layouts_text(pool), _generation_text(plan, index), *seconds]
            table.add_row(*map(Text, [*cells, total, peak, limit]), end_section=last)
        table.add_row()
    return table


def calls_table(plan: PlacementPlan) -> Table:
    """Every call of a step, with its seconds by cause; and what a pool waits for the others."""
    table = Table(title="the best plan, by call", **LOOK)
    for heading in ("stage", "call"):
        table.add_column(heading, no_wrap=True)
    for heading in ("devices", "seconds", *PARTS.values()):
        table.add_column(heading, justify="right")
    for stage in STAGES:
        name: str = stage
        for index, pool in enumerate(plan.pools):
            calls = [call for call in plan.calls if (call.stage, call.pool) == (stage, index)]
            for call in calls:
                parts = [seconds_text(value) if (value := getattr(call.cost, name)) else "" for name in PARTS]
                cells = [f"{call.role} {call.verb}", str(pool.devices), seconds_text(call.cost.seconds), *parts]
                table.add_row(*map(Text, [name, *cells]))
                name = ""
            waits = plan.stage_seconds.get(stage, 0.0) - sum(call.cost.seconds for call in calls)
            if waits > 1e-3 * plan.seconds:
                cells = [f"{'+'.join(pool.roles)} waits", str(pool.devices), seconds_text(waits)]
                table.add_row(*(Text(cell, style="dim") for cell in [name, *cells]))
                name = ""
    return table


def why_it_lost(loser: PlacementPlan, winner: PlacementPlan) -> str:
    """Sentences on the stages that cost a plan its place, by how much, and what grew in the worst of them."""
    excess = {stage: loser.stage_seconds.get(stage, 0.0) - winner.stage_seconds.get(stage, 0.0) for stage in STAGES}
    total = loser.seconds - winner.seconds
    if total <= 1e-3 * winner.seconds:
        return f"{placement_text(loser.pools)} is as fast, as far as such a prediction can tell."
    worst = max(STAGES, key=lambda stage: excess[stage])
    slow, fast = critical_calls(loser, worst), critical_calls(winner, worst)
    grown = {part: _spent(slow, part) - _spent(fast, part) for part in PARTS}
    part = max(grown, key=lambda name: grown[name])
    sentences = [
        f"{placement_text(loser.pools)} lost by {seconds_text(total)} s ({total / winner.seconds:.0%}).",
        f"Its {worst} takes {seconds_text(excess[worst])} s more: {_series(loser, slow)}, against "
        f"{_series(winner, fast)}; {PARTS[part]} grew most, by {seconds_text(grown[part])} s.",
    ]
    for stage in STAGES:
        if stage != worst and abs(excess[stage]) > 0.1 * total:
            more = "more" if excess[stage] > 0 else "less"
            sentences.append(f"Its {stage} takes {seconds_text(abs(excess[stage]))} s {more}.")
    return " ".join(sentences)


def placement_text(pools: Sequence[PlannedPool]) -> str:
    """Roles and devices of each pool, such as `actor+reference 64 | critic 64`."""
    return " | ".join(f"{'+'.join(pool.roles)} {pool.devices}" for pool in pools)


def layout_text(layout: Layout) -> str:
    """`p-t-d`, and over how many devices more the weights are split, which share the data like d."""
    text = f"{layout.stage}-{layout.tensor}-{layout.data}"
    text += f" x{shards}" if (shards := layout.fsdp * layout.expert) > 1 else ""
    return text + (f" c{layout.context}" if layout.context > 1 else "")


def machines(hardware: Hardware) -> str:
    """Machines in words, such as `16 machines of 8 x a100`."""
    some = "1 machine" if hardware.machines == 1 else f"{hardware.machines} machines"
    return f"{some} of {hardware.devices_per_machine} x {hardware.name}"


def timeline_title(config: Config, hardware: Hardware) -> str:
    """Title of a timeline."""
    return f"{config.name} on {machines(hardware)}"


def bottleneck(plan: PlacementPlan) -> str:
    """Largest part of the cost, and the longest call: of the pools that the others wait for."""
    critical = [call for stage in STAGES for call in critical_calls(plan, stage)]
    spent = Cost(**{part: _spent(critical, part) for part in PARTS})
    longest = max(critical, key=lambda call: call.cost.seconds)
    return f"{spent.bottleneck}; {longest.role} {longest.verb}"


def critical_calls(plan: PlacementPlan, stage: Stage) -> list[PlannedCall]:
    """The calls that make a stage as long as it is: of its slowest pool, or of all where pools share processors."""
    calls = [call for call in plan.calls if call.stage == stage]
    if sum(call.cost.seconds for call in calls) <= plan.stage_seconds.get(stage, 0.0) * (1 + 1e-9):
        return calls
    by_pool = [[call for call in calls if call.pool == index] for index in range(len(plan.pools))]
    return max(by_pool, key=lambda own: sum(call.cost.seconds for call in own))


def seconds_text(seconds: float) -> str:
    """Seconds with three digits, or as many as stand before the point."""
    if seconds == 0:
        return "0"
    if seconds < 1e-3:
        return f"{seconds:.1e}"
    digits = 0 if seconds >= 100 else 1 if seconds >= 10 else 2 if seconds >= 1 else 3
    return f"{seconds:,.{digits}f}"


def _spent(calls: Sequence[PlannedCall], part: str) -> float:
    return sum(getattr(call.cost, part) for call in calls)


def _series(plan: PlacementPlan, calls: Sequence[PlannedCall]) -> str:
    """Calls in words, such as `actor update + reference update on 8 devices in 2.10 s`."""
    longest = sorted(calls, key=lambda call: -call.cost.seconds)[:_NAMED]
    names = " + ".join(f"{call.role} {call.verb}" for call in calls if call in longest) or "nothing"
    names += f" + {len(calls) - _NAMED} more" if len(calls) > _NAMED else ""
    sizes = dict.fromkeys(str(plan.pools[call.pool].devices) for call in calls)
    where = f" on {' and '.join(sizes)} device{'s' * (list(sizes) != ['1'])}" if sizes else ""
    return f"{names}{where} in {seconds_text(sum(call.cost.seconds for call in calls))} s"


def _layouts_text(pool: PlannedPool) -> str:
    """Layout of each role; once if they are all the same."""
    texts = {role: layout_text(layout) for role, layout in pool.layouts.items() if role != ROLLOUT}
    same = set(texts.values())
    return same.pop() if len(same) == 1 else "\n".join(f"{role} {text}" for role, text in texts.items())


def _generation_text(plan: PlacementPlan, index: int) -> str:
    """Generation layout of the role that generates on a pool, if one does."""
    roles = [call.role for call in plan.calls if (call.pool, call.verb) == (index, "generate")]
    layouts = [plan.pools[index].layouts[role] for role in roles]
    if not layouts:
        return ""
    context = f"context {layouts[0].generation_context} x " if layouts[0].generation_context > 1 else ""
    return f"{context}{layouts[0].generation_stage}-{layouts[0].generation_tensor}"
