"""Search for a placement: which roles share devices, how many devices, and in which layouts.

Every set partition of the roles is a placement; each of its sets is a pool. A pool may have any number of devices on
one machine; on several machines it has whole machines or an even part of one. For each number of devices every layout
of every role is simulated. Roles of a pool run one after another, pools side by side, the stages of a step in order.
The answer is optimal for these costs: pruned choices are never better than kept choices.

Source: HybridFlow (arXiv:2409.19256), algorithms 1 and 2 and d_cost.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

from jaxrlhf.config import ROLLOUT, Refusal
from jaxrlhf.planner.cost.simulate import Simulator
from jaxrlhf.planner.plan import (
    Infeasible,
    PlacementPlan,
    PlacementProblem,
    PlannedCall,
    PlannedPool,
    SearchResult,
)
from jaxrlhf.planner.search.allocation import allocate, stage_seconds
from jaxrlhf.planner.search.infeasible import explain_infeasible
from jaxrlhf.planner.search.layouts import pool_sizes
from jaxrlhf.planner.search.pool_options import Point, PoolOptions
from jaxrlhf.planner.workload import STAGES

_MOST_DEVICES = 4096  # the search takes minutes for this number

Placement = tuple[tuple[str, ...], ...]
"""Roles of each pool."""


def search(problem: PlacementProblem, *, keep: int = 5) -> SearchResult:
    """Search for the fastest plans, at most one for each placement.

    Args:
      keep: Largest number of plans to return.

    Raises:
      Infeasible: Nothing fits; the message says which role lacks how many bytes, and what would help.
      Refusal: The devices cannot be divided into pools of whole hosts.
    """
    start = time.perf_counter()
    _check(problem)
    found: list[tuple[float, tuple[str, ...], list[Point]]] = []
    simulator = Simulator(problem)
    options = {offload: PoolOptions(simulator, problem, offload) for offload in problem.offloads}
    tried = allocations = 0
    for placement in placements(problem):
        tried += 1
        best: tuple[float, tuple[str, ...], list[Point]] | None = None
        for offload, pools in options.items():
            if problem.pools is None:
                points = [pools.all_points(roles) for roles in placement]
            else:
                points = [pools.points(roles, devices) for roles, devices in problem.pools]
            within = found[keep - 1][0] if len(found) >= keep else float("inf")
            within = min(within, best[0]) if best else within
            chosen, count = allocate(points, problem.hardware, within=within)
            allocations += count
            if chosen is not None:
                best = (chosen.seconds, offload, chosen.points)
        if best is not None:
            found = sorted([*found, best], key=lambda entry: entry[0])[:keep]
    if not found:
        raise Infeasible(explain_infeasible(problem))
    plans = sorted((_plan_of(problem, points, offload) for _, offload, points in found), key=lambda plan: plan.seconds)
    simulated = sum(pools.simulated for pools in options.values())
    return SearchResult(tuple(plans), tried, allocations, simulated, time.perf_counter() - start)


def placements(problem: PlacementProblem) -> Iterator[Placement]:
    """Yield every set partition of the roles that keeps `together` groups in one pool, or only the fixed placement."""
    if problem.pools is not None:
        yield tuple(roles for roles, _ in problem.pools)
        return
    for partition in _partitions([role.name for role in problem.roles]):
        if all(any(set(group) <= set(pool) for pool in partition) for group in problem.together):
            yield partition


def _partitions(names: Sequence[str]) -> Iterator[Placement]:
    """Yield all set partitions, each set in the order of `names`."""
    if not names:
        yield ()
        return
    *others, last = names
    for partition in _partitions(others):
        for place, pool in enumerate(partition):
            yield (*partition[:place], (*pool, last), *partition[place + 1 :])
        yield (*partition, (last,))


def _plan_of(problem: PlacementProblem, points: Sequence[Point], offload: tuple[str, ...]) -> PlacementPlan:
    """Build the plan of the chosen points, largest pool first."""
    ordered = sorted(points, key=lambda point: -point.devices)
    order = [role.name for role in problem.roles] + [ROLLOUT]
    pools = tuple(_pool(point, order) for point in ordered)
    calls = [call for place, point in enumerate(ordered) for call in _calls(point, place)]
    calls.sort(key=lambda call: STAGES.index(call.stage))
    combined = stage_seconds([point.seconds for point in ordered], shared=problem.hardware.takes_turns)
    generation = next((point.generation for point in points if point.generation), None)
    slots = generation.how.at_once * generation.how.replicas if generation else None
    return PlacementPlan(pools, offload, tuple(calls), dict(zip(STAGES, combined, strict=True)), slots)


def _pool(point: Point, order: list[str]) -> PlannedPool:
    idle = sum(own.idle_bytes for own in point.chosen)
    peaks = [
        (idle - own.idle_bytes + step.held_bytes, f"{role} {step.verb}")
        for role, own in zip(point.roles, point.chosen, strict=True)
        for step in own.steps
    ]
    peaks.append((idle, "no call"))
    if point.generation is not None:
        own = point.chosen[point.roles.index(point.generation.role)]
        held = max(own.loading_bytes, own.generating_bytes + point.generation.cache_bytes)
        peaks.append((idle - own.idle_bytes + held, f"{point.generation.role} generate"))
    peak_bytes, during = max(peaks)
    layouts = {role: own.layout for role, own in zip(point.roles, point.chosen, strict=True)}
    roles = tuple(sorted(point.roles, key=order.index))
    return PlannedPool(roles, point.devices, {role: layouts[role] for role in roles}, peak_bytes, during)


def _calls(point: Point, place: int) -> list[PlannedCall]:
    calls = []
    for role, own in zip(point.roles, point.chosen, strict=True):
        calls += [PlannedCall(step.stage, place, role, step.verb, step.cost) for step in own.steps]
    generation = point.generation
    if generation is None:
        return calls
    how = generation.how
    note = f"{how.waves} wave{'s' * (how.waves > 1)} of {how.at_once} responses"
    note += f" on each of {how.replicas} replicas" if how.replicas > 1 else ""
    moves = (
        [] if generation.move is None else [PlannedCall("generate", place, generation.role, "move", generation.move)]
    )
    before = [call for call in calls if call.stage == "generate"]
    generates = PlannedCall("generate", place, generation.role, "generate", generation.cost, note)
    return [*before, *moves, generates, *(call for call in calls if call.stage != "generate")]


def _check(problem: PlacementProblem) -> None:
    """Refuse devices that cannot be divided into the pools and hosts; `config` has checked the roles of pools."""
    hardware, host = problem.hardware, problem.devices_per_host or 1
    if problem.has_rollout_pool and not any(role.generates for role in problem.roles):
        raise Refusal(f"no role generates, but a pool places {ROLLOUT}; remove this pool")
    if hardware.devices > _MOST_DEVICES:
        raise Refusal(f"the search supports at most {_MOST_DEVICES} devices, got {hardware.devices}")
    if not pool_sizes(hardware, devices_per_host=host):
        raise Refusal(
            f"{hardware.devices} x {hardware.name} in machines of {hardware.devices_per_machine} have no pool of "
            f"whole hosts of {host} devices; use smaller hosts, or hardware with more machines"
        )
    sizes = [devices for _, devices in problem.pools or ()]
    if sum(sizes) > hardware.devices:
        raise Refusal(f"pools have {sizes} devices, but only {hardware.devices} devices exist; make the pools smaller")
    if any(size % host for size in sizes):
        raise Refusal(f"pools have {sizes} devices, but must have whole hosts of {host}; change the pool sizes")


GAIN_WORTH_SAYING = 0.05  # share of a step's seconds; predictions are not more accurate


def binding_slots(problem: PlacementProblem, best: PlacementPlan) -> str | None:
    """Return a sentence if the best plan would be faster with more slots than `rollout.slots` allows; else None."""
    given = problem.workload.slots
    if given is None or best.slots is None or best.slots < given:
        return None
    free = search(replace(problem, workload=replace(problem.workload, slots=None)), keep=1).plans[0]
    if free.seconds > (1 - GAIN_WORTH_SAYING) * best.seconds:
        return None
    return (
        f"rollout.slots={given} limits speed: with {free.slots} slots the prediction is {free.seconds:.3g} s per step "
        f"instead of {best.seconds:.3g} s; with rollout.slots=None the plan chooses"
    )
