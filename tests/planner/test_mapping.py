"""The search, compared with an exhaustive search on many small problems with different best placements."""

import functools
import math
import re
from dataclasses import replace

import pytest
from small_problems import ALL, Placement, a_problem, found_in, solve

from jaxrlhf.config import ROLLOUT, Layout
from jaxrlhf.planner.cost.memory import cache_bytes_per_token
from jaxrlhf.planner.cost.simulate import Simulator
from jaxrlhf.planner.plan import PlacementPlan, PlacementProblem, SearchResult
from jaxrlhf.planner.search.mapping import search
from jaxrlhf.planner.workload import STAGES


def placement_of(plan: PlacementPlan) -> Placement:
    """Return the roles of each pool of a plan."""
    return frozenset(frozenset(pool.roles) for pool in plan.pools)


DATAFLOWS = ["sft", "grpo", "ppo", "safe", "large critic", "judges"]
CASES = [(seed,) for seed in range(40)]
CASES += [(seed,) for seed in (91, 200, 225, 236, 259, 279)]  # with roles in host memory
CASES += [(seed,) for seed in (81, 85, 108, 151, 160, 231, 253, 305, 320, 328)]  # with weights sent to a rollout pool
CASES += [(seed,) for seed in (118, 119, 205, 217, 265, 273, 278, 298, 306)]  # with many pools and all kinds of layouts
CASES += [(1000 + 10 * place + n, name, (1, 4)) for place, name in enumerate(DATAFLOWS) for n in range(2)]


def finds_the_cheapest(expected: dict[Placement, float], found: SearchResult | None) -> None:
    if found is None:
        assert expected == {}
        return
    seconds = [plan.seconds for plan in found.plans]
    assert seconds == sorted(seconds)
    by_placement = {placement_of(plan): plan.seconds for plan in found.plans}
    assert len(by_placement) == len(seconds)
    assert by_placement == pytest.approx(expected, rel=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case[:2])))
def test_the_search_finds_the_cheapest_step_of_every_placement(case):
    finds_the_cheapest(*solve(a_problem(*case)))


@pytest.mark.slow
@pytest.mark.parametrize("seed", [349, 355, 580, 691])
def test_more_room_never_hides_a_cheaper_plan(seed):
    """If memory for the cache is scarce, layouts that hold less are kept although others are as fast."""
    expected, found = solve(a_problem(seed))
    assert found is not None
    finds_the_cheapest(expected, found)


@pytest.mark.slow
def test_layouts_that_are_given_hold_for_a_rollout_apart():
    sizes = []
    for seed in range(24):
        problem = a_problem(seed, "grpo", (1, 4) if seed % 2 else (2, 2))
        given = (Layout(), Layout(fsdp=2, generation_tensor=2), Layout(fsdp=2, generation_stage=4), Layout(data=1))
        pools = ((("actor", "reference"), 2), ((ROLLOUT,), 2))
        expected, found = solve(replace(problem, pools=pools, layouts={"actor": given}, together=()))
        finds_the_cheapest(expected, found)
        for plan in found.plans if found else ():
            (layout,) = [pool.layouts[ROLLOUT] for pool in plan.pools if ROLLOUT in pool.roles]
            sizes.append((layout.generation_stage, layout.generation_tensor))
    assert set(sizes) == {(1, 1), (1, 2)}  # a replica of four does not fill the pool


def test_experts_are_divided_where_that_is_cheapest():
    divided = []
    for seed in range(2000, 2024):
        problem = a_problem(seed, "mixture", (1, 4) if seed % 2 else (2, 2))
        expected, found = solve(replace(problem, pools=None, layouts=None, fsdp=True))
        finds_the_cheapest(expected, found)
        for plan in found.plans if found else ():
            layouts = {role: layout for pool in plan.pools for role, layout in pool.layouts.items()}
            divided.append(layouts["actor"].expert)
    assert min(divided.count(1), divided.count(2)) >= 5


@pytest.mark.parametrize(
    ("shape", "some", "allowed"), [((1, 6), {2, 4, 6}, {1, 2, 3, 4, 5, 6}), ((2, 6), {3, 6}, {1, 3, 6, 12})]
)
def test_one_machine_of_six_is_cut_anywhere_and_two_are_halved_and_then_cut_in_three(shape, some, allowed):
    sizes = set()
    for seed in range(12, 24):
        expected, found = solve(replace(a_problem(seed, "grpo", shape), pools=None))
        finds_the_cheapest(expected, found)
        sizes |= {pool.devices for plan in (found.plans if found else ()) for pool in plan.pools}
    assert some <= sizes <= allowed


@functools.cache
def feasible() -> list[tuple[PlacementProblem, SearchResult]]:
    """Return the sampled problems for which a plan exists, with their results."""
    found = [(problem, found_in(problem)) for problem in (a_problem(*case) for case in CASES)]
    return [(problem, plans) for problem, plans in found if plans is not None]


def test_the_problems_differ_in_what_wins():
    best = [(problem, found.plans[0]) for problem, found in feasible()]
    assert 0.5 < len(best) / len(CASES) < 0.95  # the others do not fit
    assert len({placement_of(plan) for _, plan in best}) >= 20
    pools = [len(plan.pools) for _, plan in best]
    assert min(pools.count(1), pools.count(2)) >= 15
    assert max(pools) >= 3
    several = [bool(plan.offload) for problem, plan in best if len(problem.offloads) > 1]
    assert min(several.count(False), several.count(True)) >= 3
    idle = [sum(pool.devices for pool in plan.pools) < problem.hardware.devices for problem, plan in best]
    assert min(idle.count(False), idle.count(True)) >= 5
    for change in ("together", "layouts", "pools", "devices_per_host"):
        assert sum(bool(getattr(problem, change)) for problem, _ in best) >= 2, change
    assert sum(problem.hardware.shared_compute for problem, _ in best) >= 3


def test_the_best_of_placements_differ_in_their_layouts():
    plans = [plan for _, found in feasible() for plan in found.plans]
    layouts = [layout for plan in plans for pool in plan.pools for layout in pool.layouts.values()]
    for size in ("data", "fsdp", "stage", "tensor", "generation_stage", "generation_tensor"):
        assert sum(getattr(layout, size) > 1 for layout in layouts) >= 10, size
    assert sum(not layout.refines for layout in layouts) >= 5
    waves = [problem.workload.slots for problem, found in feasible() if "waves" in str(found.plans[0].calls)]
    assert waves.count(None) >= 5, "for want of memory"
    assert waves.count(3) >= 5, "because fewer slots were asked for"
    assert sum(call.verb == "switch" for plan in plans for call in plan.calls) >= 20
    assert sum(call.verb == "move" for plan in plans for call in plan.calls) >= 10
    assert sum(call.verb == "offload" for plan in plans for call in plan.calls) >= 10


def test_every_plan_is_what_its_calls_and_pools_say():
    for problem, found in feasible():
        usable = problem.hardware.memory_bytes * problem.hardware.usable_memory
        one_processor = problem.hardware.shared_compute and problem.hardware.machines == 1
        combined = sum if one_processor else max
        for plan in found.plans:
            placed = [role for pool in plan.pools for role in pool.roles if role != ROLLOUT]
            assert sorted(placed) == sorted(role.name for role in problem.roles)
            devices = [pool.devices for pool in plan.pools]
            assert sum(devices) <= problem.hardware.devices
            assert devices == sorted(devices, reverse=True)
            assert list(plan.stage_seconds) == list(STAGES)
            for stage, seconds in plan.stage_seconds.items():
                of_pools = [0.0] * len(plan.pools)
                for call in plan.calls:
                    of_pools[call.pool] += call.cost.seconds if call.stage == stage else 0.0
                assert seconds == pytest.approx(combined(of_pools), rel=1e-9)
            assert plan.seconds == sum(plan.stage_seconds.values())
            order = [STAGES.index(call.stage) for call in plan.calls]
            assert order == sorted(order)
            for number, pool in enumerate(plan.pools):
                assert pool.peak_bytes <= usable * (1 + 1e-12)
                assert pool.peak_bytes == pytest.approx(peak_of(plan, number, problem), rel=1e-9)
                assert list(pool.layouts) == list(pool.roles)
                assert all(call.role in pool.roles for call in plan.calls if call.pool == number)
                if pool.peak_during == "no call":
                    continue
                role, verb = pool.peak_during.split()
                assert any((call.pool, call.role, call.verb) == (number, role, verb) for call in plan.calls)


def peak_of(plan: PlacementPlan, number: int, problem: PlacementProblem) -> float:
    """Return the peak bytes of a pool, from the bytes that each of its roles holds alone."""
    pool, simulator = plan.pools[number], Simulator(problem)
    roles = {role.name: role for role in problem.roles}
    generating = next((call.role for call in plan.calls if call.verb == "generate" and call.pool == number), None)
    alone = {
        name: simulator.rollout(roles["actor"], layout)
        if name == ROLLOUT
        else simulator.role(roles[name], layout, pool.devices, plan.offload, generates=name == generating)
        for name, layout in pool.layouts.items()
    }
    idle = sum(own.idle_bytes for own in alone.values())
    peaks = [idle, *(idle - own.idle_bytes + step.held_bytes for own in alone.values() for step in own.steps)]
    if generating is not None:
        own, layout = alone[generating], pool.layouts[generating]
        responses = plan.slots / (pool.devices // (layout.generation_stage * layout.generation_tensor))
        token = cache_bytes_per_token(roles["actor"].model, layout, itemsize=problem.software.compute_bytes)
        cache = responses * problem.workload.longest_tokens * token * problem.software.cache_copies
        peaks += [idle - own.idle_bytes + held for held in (own.loading_bytes, own.generating_bytes + cache)]
    return max(peaks)


def test_slots_are_the_responses_that_are_decoded_at_once():
    looked = 0
    for problem, found in feasible():
        for plan in found.plans:
            calls = [(call, plan.pools[call.pool]) for call in plan.calls if call.verb == "generate"]
            if not any(role.generates for role in problem.roles):
                assert plan.slots is None
                assert calls == []
                continue
            ((call, pool),) = calls
            layout = pool.layouts[call.role]
            replicas = pool.devices // (layout.generation_stage * layout.generation_tensor)
            waves, at_once = map(int, re.match(r"(\d+) waves? of (\d+) responses", call.note).groups())
            assert plan.slots == at_once * replicas
            assert waves * plan.slots >= problem.workload.responses > (waves - 1) * plan.slots - replicas * waves
            if problem.workload.slots is not None:
                assert at_once <= math.ceil(problem.workload.slots / replicas)
            looked += waves > 1
    assert looked > 20


def test_the_search_is_deterministic_and_keeps_the_cheapest():
    for problem, found in feasible()[::6]:
        again = search(problem, keep=ALL)
        assert replace(again, seconds=0.0) == replace(found, seconds=0.0)
        few = search(problem, keep=2)
        assert [plan.seconds for plan in few.plans] == [plan.seconds for plan in found.plans[:2]]
        assert few.placements == found.placements
        assert few.simulated == found.simulated
