"""Predictions for schedules of a placement problem, simulated on every plan that allows the schedule."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from jaxrlhf.config import ROLLOUT, Refusal
from jaxrlhf.engine.buckets import cache_capacities
from jaxrlhf.planner.cost.cost import Decoding, decode_cost, prefill_cost
from jaxrlhf.planner.cost.simulate import pool_hardware
from jaxrlhf.planner.plan import Infeasible, PlacementPlan, PlacementProblem
from jaxrlhf.planner.schedules.lengths import ResponseLengths
from jaxrlhf.planner.schedules.simulation import Prediction, Schedule, StepTimes, simulate
from jaxrlhf.planner.search.layouts import pool_sizes
from jaxrlhf.planner.search.mapping import search
from jaxrlhf.planner.workload import Stage

_COUNTS, _SPLITS = 24, 12
_FITTED_TOKENS = (256, 1024, 4096)


@dataclass(frozen=True)
class ScheduledPlan:
    """Schedule on the placement of a plan, with its prediction."""

    schedule: Schedule
    plan: PlacementPlan
    prediction: Prediction


def predictions(
    problem: PlacementProblem,
    best: PlacementPlan,
    lengths: ResponseLengths,
    *,
    staleness: int,
    over_provision: float = 1.0,
) -> list[ScheduledPlan]:
    """Predict the synchronous schedule on the best plan, then the requested schedule on several placements.

    The requested schedule's predictions are sorted, fastest first. A placement with generation and learning on the same
    devices is tried only if groups can be postponed: taking turns gains nothing else. If the problem fixes pools, only
    these pools are tried. Otherwise several sizes of a separate generation pool are tried, from the smallest to the
    largest, and the roles that learn share the other devices.

    Raises:
      Refusal: The problem has no generation, or the schedule gains nothing on any placement that fits.
    """
    if not any(role.generates for role in problem.roles):
        raise Refusal("schedules require steps that generate, but this algorithm does not generate; remove --staleness")
    shared = _rollout_pool(best) is None
    plans = [best] if over_provision > 1 or not shared else []
    if problem.pools is None and not problem.hardware.takes_turns and problem.workload.quantize is None:
        plans += list(_with_rollout_pool(problem))
    if over_provision > 1 and staleness < 2:  # a separate generation pool uses the only step of staleness itself
        plans = [plan for plan in plans if _rollout_pool(plan) is None]
    if not plans:
        raise Refusal(
            f"staleness={staleness} is only faster with a separate pool for generation, which does not fit here: add "
            "a pool with 'rollout', or more devices; on one pool, use --over-provision"
        )

    def scheduled(plan: PlacementPlan, staleness: int, over_provision: float) -> ScheduledPlan:
        apart = _rollout_pool(plan) is not None and not problem.hardware.takes_turns
        schedule = Schedule(staleness, over_provision, apart)
        work = problem.workload
        times = times_of(problem, plan, over_provision=over_provision)
        result = simulate(schedule, times, lengths, groups=work.prompts, copies=work.responses // work.prompts)
        return ScheduledPlan(schedule, plan, result)

    found = [scheduled(plan, staleness, over_provision) for plan in plans]
    found.sort(key=lambda one: one.prediction.step_s)
    return [scheduled(best, 0, 1.0), *found]


def times_of(problem: PlacementProblem, plan: PlacementPlan, *, over_provision: float = 1.0) -> StepTimes:
    """Return the seconds of the parts of a plan's step, from the cost model."""
    work, software = problem.workload, problem.software
    generator = next(role for role in problem.roles if role.generates)
    name = generator.name if _rollout_pool(plan) is None else ROLLOUT
    place, pool = next((place, pool) for place, pool in enumerate(plan.pools) if name in pool.roles)
    layout, hardware = pool.layouts[name], pool_hardware(problem.hardware, pool.devices)
    replicas = pool.devices // layout.slot_devices
    slots = _slots(problem, plan, over_provision)

    def decode_s(count: int, positions: int) -> float:
        """Return the seconds to decode a token of `count` responses on each replica, reading `positions` positions."""
        one = replace(work, responses=count * replicas, prompt_tokens=positions - 1, response_tokens=1)
        one = replace(one, longest_tokens=positions)
        return decode_cost(generator.model, layout, Decoding(1, count, replicas), one, software, hardware).seconds

    def prefill_s(tokens: int) -> float:
        """Return the seconds to prefill a sequence of `tokens` tokens on each replica."""
        one = replace(work, prompts=replicas, prompt_tokens=tokens)
        return prefill_cost(generator.model, layout, Decoding(1, 1, replicas), one, software, hardware).seconds

    most = math.ceil(slots / replicas)
    count_N = np.unique(np.geomspace(1, most, min(most, _COUNTS)).round().astype(int))
    cache_s = (decode_s(1, 1025) - decode_s(1, 1)) / 1024
    free_N = np.array([decode_s(int(count), 1) - count * cache_s for count in count_N])
    powers = np.vander(np.array(_FITTED_TOKENS, float), 3, increasing=True)
    fixed, linear, square = np.linalg.solve(powers, [prefill_s(tokens) for tokens in _FITTED_TOKENS])
    return StepTimes(
        slots=slots,
        active_N=count_N * replicas,
        decode_s_N=free_N,
        cache_s=cache_s / replicas,
        capacities=cache_capacities(work.longest_tokens),
        prefill_s=(float(fixed), float(linear) / replicas, float(square) / replicas),
        round_s=_other_s(problem, plan, place, generates=True),
        learn_s=_other_s(problem, plan, place, generates=False),
        prompt_tokens=work.prompt_tokens,
    )


def _rollout_pool(plan: PlacementPlan) -> int | None:
    """Return the index of the pool that only generates; None if there is no such pool."""
    return next((place for place, pool in enumerate(plan.pools) if ROLLOUT in pool.roles), None)


def _with_rollout_pool(problem: PlacementProblem) -> Iterator[PlacementPlan]:
    """Yield the best plan for each size of a separate generation pool, if a plan fits."""
    devices, roles = problem.hardware.devices, tuple(role.name for role in problem.roles)
    known = pool_sizes(problem.hardware, devices_per_host=problem.devices_per_host or 1)
    sizes = [size for size in known if devices - size in known]
    spread = np.unique(np.linspace(0, len(sizes) - 1, min(len(sizes), _SPLITS)).round().astype(int)) if sizes else ()
    for index in spread:
        size = sizes[index]
        try:
            yield search(replace(problem, pools=((roles, devices - size), ((ROLLOUT,), size))), keep=1).plans[0]
        except Infeasible:
            continue


def _slots(problem: PlacementProblem, plan: PlacementPlan, over_provision: float) -> int:
    """Return the number of responses decoded at once, with `over_provision` times the groups in progress."""
    assert plan.slots is not None, "a plan with generation has slots"
    if over_provision == 1:
        return plan.slots
    work = problem.workload
    prompts = math.ceil(work.prompts * over_provision)
    more = replace(work, prompts=prompts, responses=prompts * (work.responses // work.prompts))
    pools = tuple((pool.roles, pool.devices) for pool in plan.pools)
    wider = search(replace(problem, workload=more, pools=pools, offloads=(plan.offload,)), keep=1).plans[0]
    return wider.slots or plan.slots


def _other_s(problem: PlacementProblem, plan: PlacementPlan, place: int, *, generates: bool) -> float:
    """Return the seconds of a step besides generation itself: of a generation round, or of learning.

    If generation has a separate pool, all other calls on this pool belong to the round, and calls on other pools are
    learning. On a shared pool, calls of the prepare and update stages are learning.

    Args:
      place: Index of the pool that generates.
      generates: Whether to return the seconds of the round.
    """
    apart = _rollout_pool(plan) is not None
    stages: Sequence[Stage] = ("generate",) if generates else ("prepare", "update")
    if generates:
        calls = [call for call in plan.calls if call.pool == place and call.verb != "generate"]
        return sum(call.cost.seconds for call in calls if apart or call.stage in stages)
    seconds = 0.0
    for stage in stages:
        busy = [0.0] * len(plan.pools)
        for call in plan.calls:
            busy[call.pool] += call.cost.seconds * (call.stage == stage and not (apart and call.pool == place))
        seconds += sum(busy) if problem.hardware.takes_turns else max(busy)
    return seconds
