"""Report of a search in tables and sentences: the best plans, their seconds by cause, and why others are slower."""

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
"""Style of all tables, as arguments of `Table`."""


def report(search: SearchResult, hardware: Hardware, notes: Sequence[str], *, shown: int = 5) -> RenderableType:
    """Return the whole report, best plan first."""
    best, *others = search.plans
    plans = search.plans[:shown]
    waits = [
        Text(f"plan {rank}: offloaded to host memory while not in use: {', '.join(plan.offload)}")
        for rank, plan in enumerate(plans, start=1)
        if plan.offload
    ]
    waits += [Text()] * bool(waits)
    rows: list[RenderableType] = [plans_table(plans, hardware), *waits, calls_table(best), Text()]
    rows += [Text(f"{call.role} {call.verb}: {call.note}") for call in best.calls if call.note]
    rows += [Text(), Text(why_it_lost(others[0], best)), Text()] if others else [Text()]
    idle = hardware.devices - sum(pool.devices for pool in best.pools)
    rows += [Text(f"{idle} of {hardware.devices} devices are unused: no plan is faster with them")] if idle else []
    extent = f"{search.placements} placements, {search.allocations} allocations and {search.simulated} layouts"
    rows += [Text(f"searched {extent} in {search.seconds:.2f} s")]
    rows += [Text(f"note: {note}", style="dim") for note in notes]
    return Group(*rows)


def plans_table(plans: Sequence[PlacementPlan], hardware: Hardware) -> Table:
    """Return a table of plans, with one line for each pool of a plan."""
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
            where = f"{' + '.join(pool.roles)} {pool.devices}{'' if last else ' |'}"  # may be wrapped at the spaces
            peak = f"{pool.peak_bytes / _GIB:.1f}"
            cells = [str(rank) if first else "", where, _layouts_text(pool), _generation_text(plan, index), *seconds]
            table.add_row(*map(Text, [*cells, total, peak, limit]), end_section=last)
        table.add_row()
    return table


def calls_table(plan: PlacementPlan) -> Table:
    """Return a table of the calls of a step with their seconds by cause, and of the seconds that pools wait."""
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
    """Return sentences on why a plan is slower than the best: by how much, in which stages, and from which cause."""
    excess = {stage: loser.stage_seconds.get(stage, 0.0) - winner.stage_seconds.get(stage, 0.0) for stage in STAGES}
    total = loser.seconds - winner.seconds
    if total <= 1e-3 * winner.seconds:
        return f"{placement_text(loser.pools)} is as fast, within the precision of the prediction."
    worst = max(STAGES, key=lambda stage: excess[stage])
    slow, fast = critical_calls(loser, worst), critical_calls(winner, worst)
    grown = {part: _seconds(slow, part) - _seconds(fast, part) for part in PARTS}
    part = max(grown, key=lambda name: grown[name])
    sentences = [
        f"{placement_text(loser.pools)} is slower by {seconds_text(total)} s ({total / winner.seconds:.0%}).",
        f"Its {worst} takes {seconds_text(excess[worst])} s more: {_series(loser, slow)}, against "
        f"{_series(winner, fast)}; {PARTS[part]} grew most, by {seconds_text(grown[part])} s.",
    ]
    for stage in STAGES:
        if stage != worst and abs(excess[stage]) > 0.1 * total:
            more = "more" if excess[stage] > 0 else "less"
            sentences.append(f"Its {stage} takes {seconds_text(abs(excess[stage]))} s {more}.")
    return " ".join(sentences)


def placement_text(pools: Sequence[PlannedPool]) -> str:
    """Return the roles and devices of each pool as text, such as `actor+reference 64 | critic 64`."""
    return " | ".join(f"{'+'.join(pool.roles)} {pool.devices}" for pool in pools)


def layout_text(layout: Layout) -> str:
    """Return a layout as `stage-tensor-data`, then `xN` for `fsdp * expert` and `cN` for `context` if above 1."""
    text = f"{layout.stage}-{layout.tensor}-{layout.data}"
    text += f" x{shards}" if (shards := layout.fsdp * layout.expert) > 1 else ""
    return text + (f" c{layout.context}" if layout.context > 1 else "")


def machines(hardware: Hardware) -> str:
    """Return the machines as text, such as `16 machines of 8 x a100`."""
    some = "1 machine" if hardware.machines == 1 else f"{hardware.machines} machines"
    return f"{some} of {hardware.devices_per_machine} x {hardware.name}"


def timeline_title(config: Config, hardware: Hardware) -> str:
    """Return the title of a timeline."""
    return f"{config.name} on {machines(hardware)}"


def bottleneck(plan: PlacementPlan) -> str:
    """Return the largest part of the cost and the longest call, over calls of the pools that other pools wait for."""
    critical = [call for stage in STAGES for call in critical_calls(plan, stage)]
    cost = Cost(**{part: _seconds(critical, part) for part in PARTS})
    longest = max(critical, key=lambda call: call.cost.seconds)
    return f"{cost.bottleneck}; {longest.role} {longest.verb}"


def critical_calls(plan: PlacementPlan, stage: Stage) -> list[PlannedCall]:
    """Return the calls that determine the length of a stage: of its slowest pool, or all if pools take turns."""
    calls = [call for call in plan.calls if call.stage == stage]
    if sum(call.cost.seconds for call in calls) <= plan.stage_seconds.get(stage, 0.0) * (1 + 1e-9):
        return calls
    by_pool = [[call for call in calls if call.pool == index] for index in range(len(plan.pools))]
    return max(by_pool, key=lambda own: sum(call.cost.seconds for call in own))


def seconds_text(seconds: float) -> str:
    """Return seconds as text with three digits, or with all digits before the decimal point."""
    if seconds == 0:
        return "0"
    if seconds < 1e-3:
        return f"{seconds:.1e}"
    digits = 0 if seconds >= 100 else 1 if seconds >= 10 else 2 if seconds >= 1 else 3
    return f"{seconds:,.{digits}f}"


def _seconds(calls: Sequence[PlannedCall], part: str) -> float:
    return sum(getattr(call.cost, part) for call in calls)


def _series(plan: PlacementPlan, calls: Sequence[PlannedCall]) -> str:
    """Return calls as text, such as `actor update + reference update on 8 devices in 2.10 s`."""
    longest = sorted(calls, key=lambda call: -call.cost.seconds)[:_NAMED]
    names = " + ".join(f"{call.role} {call.verb}" for call in calls if call in longest) or "nothing"
    names += f" + {len(calls) - _NAMED} more" if len(calls) > _NAMED else ""
    sizes = dict.fromkeys(str(plan.pools[call.pool].devices) for call in calls)
    where = f" on {' and '.join(sizes)} device{'s' * (list(sizes) != ['1'])}" if sizes else ""
    return f"{names}{where} in {seconds_text(sum(call.cost.seconds for call in calls))} s"


def _layouts_text(pool: PlannedPool) -> str:
    """Return the layout of each role as text; a single layout if all are equal."""
    texts = {role: layout_text(layout) for role, layout in pool.layouts.items() if role != ROLLOUT}
    same = set(texts.values())
    return same.pop() if len(same) == 1 else "\n".join(f"{role} {text}" for role, text in texts.items())


def _generation_text(plan: PlacementPlan, index: int) -> str:
    """Return the generation layout of the pool's generating role as text; empty if the pool does not generate."""
    roles = [call.role for call in plan.calls if (call.pool, call.verb) == (index, "generate")]
    layouts = [plan.pools[index].layouts[role] for role in roles]
    if not layouts:
        return ""
    context = f"context {layouts[0].generation_context} x " if layouts[0].generation_context > 1 else ""
    return f"{context}{layouts[0].generation_stage}-{layouts[0].generation_tensor}"
