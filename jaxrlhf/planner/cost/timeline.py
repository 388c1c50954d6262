"""From chosen layouts to a plan: every call of every pool, and what decides how long a step takes."""

from collections.abc import Sequence

from jaxrlhf.config import ROLLOUT
from jaxrlhf.planner.plan import PlacementPlan, PlacementProblem, PlannedCall, PlannedPool
from jaxrlhf.planner.search.allocation import stage_seconds
from jaxrlhf.planner.search.pool_options import Point
from jaxrlhf.planner.workload import STAGES


def plan_of(problem: PlacementProblem, points: Sequence[Point], offload: tuple[str, ...]) -> PlacementPlan:
    """The plan that the chosen points make up, largest pool first."""
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
    before = [call for call in calls if call.stage == "generate"]
    after = [call for call in calls if call.stage != "generate"]
    if generation.move is not None:
        before.append(PlannedCall("generate", place, generation.role, "move", generation.move))
    how = generation.how
    rounds = f"{how.waves} wave{'s' if how.waves > 1 else ''} of {how.at_once}"
    note = f"{rounds} responses" + (f" on each of {how.replicas} replicas" if how.replicas > 1 else "")
    return [*before, PlannedCall("generate", place, generation.role, "generate", generation.cost, note), *after]
