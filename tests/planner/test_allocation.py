"""Allocation of devices to pools, compared with every distribution, and placements predicted by hand."""

import itertools
import math
import random
from dataclasses import replace

import pytest
from made_plans import machines
from small_problems import PLAIN

from jaxrlhf.config import ROLLOUT, Layout
from jaxrlhf.planner.hardware import Hardware
from jaxrlhf.planner.plan import Infeasible, PlacementProblem
from jaxrlhf.planner.search.allocation import allocate
from jaxrlhf.planner.search.mapping import placements, search
from jaxrlhf.planner.search.pool_options import Point
from jaxrlhf.planner.workload import Role, Workload
from tests.planner.test_infeasible import LEARNER, LEARNER_BYTES, REFERENCE, SMALL, TINY, TINY_WEIGHTS
from tests.planner.test_infeasible import WEIGHTS as SMALL_WEIGHTS
from tests.planner.test_infeasible import WORK as LONG

WORK = Workload(prompts=4, responses=4, prompt_tokens=4.0, response_tokens=4.0, longest_tokens=10, updates=2)
ACTOR = Role("actor", TINY, "lm", generates=True, passes=0, trained=True)


def hardware_of(count: int, machine: int, **changes) -> Hardware:
    """Hardware whose whole memory is usable, without latencies, and with free links."""
    free = dict.fromkeys(("link_latency_s", "network_latency_s", "layer_overhead_s", "dispatch_overhead_s"), 0.0)
    free |= {"link_bytes_per_s": 1e30, "network_bytes_per_s": 1e30, "usable_memory": 1.0, "memory_bytes": 1e15}
    return machines(machines=count, devices_per_machine=machine, **{**free, **changes})


def a_problem(roles: tuple[Role, ...], hardware: Hardware, work: Workload = WORK, **changes) -> PlacementProblem:
    return PlacementProblem(roles, work, PLAIN, hardware, **changes)


# Set partitions.


@pytest.mark.parametrize(("count", "bell"), [(1, 1), (3, 5), (5, 52)])
def test_there_are_as_many_placements_as_set_partitions(count, bell):
    roles = tuple(replace(REFERENCE, name=f"role_{n}") for n in range(count))
    problem = a_problem(roles, hardware_of(1, 2))
    found = {frozenset(map(frozenset, pools)) for pools in placements(problem)}
    assert len(list(placements(problem))) == len(found) == search(problem, keep=1).placements == bell
    assert all(sorted(itertools.chain(*pools)) == [role.name for role in roles] for pools in found)
    if count < 3:
        return
    tied = list(placements(replace(problem, together=(("role_0", "role_2"),))))
    assert len(tied) == {3: 2, 5: 15}[count]  # as many as for one role fewer
    assert all(any({"role_0", "role_2"} <= set(pool) for pool in pools) for pools in tied)


def test_groups_that_overlap_are_one():
    roles = tuple(replace(REFERENCE, name=name) for name in "abcd")
    tied = placements(a_problem(roles, hardware_of(1, 4), together=(("a", "b"), ("b", "c"))))
    assert {frozenset(map(frozenset, pools)) for pools in tied} == {
        frozenset({frozenset("abcd")}),
        frozenset({frozenset("abc"), frozenset("d")}),
    }


# Allocation.


def a_pool(draw: random.Random, name: str, most: int, ties: bool) -> list[Point]:
    def seconds() -> float:
        return float(draw.randint(0, 4)) if ties else draw.random()

    count = draw.randint(1, 6)
    return [Point((name,), draw.randint(1, most), (seconds(), seconds(), seconds()), (), None) for _ in range(count)]


def seconds_of(points, shared: bool) -> float:
    stages = [[point.seconds[stage] for point in points] for stage in range(3)]
    return sum(sum(stage) if shared else max(stage) for stage in stages)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("ties", [False, True])
def test_the_allocation_is_the_cheapest_of_all(shared, ties):
    outcomes = []
    for seed in range(300):
        draw = random.Random(seed)
        devices = draw.choice([2, 4, 8])
        hardware = machines(machines=1, devices_per_machine=devices, shared_compute=shared)
        pools = [a_pool(draw, str(place), devices, ties) for place in range(draw.randint(1, 4))]
        every = [
            seconds_of(choice, shared)
            for choice in itertools.product(*pools)
            if sum(point.devices for point in choice) <= devices
        ]
        least = min(every, default=math.inf)
        within = draw.choice([math.inf, least * 1.5, least * 0.9, least * 1.0001, least * 0.9999])
        within = least if ties and draw.random() < 0.2 else within
        found, _ = allocate(pools, hardware, within=within)
        outcomes.append(found is None)
        if not least < within:
            assert found is None
            continue
        assert found is not None
        assert found.seconds == pytest.approx(least, rel=1e-12)
        assert found.seconds == pytest.approx(seconds_of(found.points, shared), rel=1e-12)
        assert sum(point.devices for point in found.points) <= devices
        assert [point.roles for point in found.points] == [(str(place),) for place in range(len(pools))]
        assert all(point in pool for point, pool in zip(found.points, pools, strict=True))
    assert 50 < sum(outcomes) < 250


# Bytes by hand.


@pytest.mark.parametrize(("rows", "waves", "at_once"), [(8.5, 1, 8), (7.5, 2, 4), (1.0, 8, 1)])
def test_a_cache_that_does_not_fit_takes_waves(rows, waves, at_once):
    generator = replace(ACTOR, trained=False)
    row = 10 * (2 * 2 * 2 * 2 * 2)
    memory = TINY_WEIGHTS * (2 + 2) + rows * row  # frozen, and the copy that generates
    work = replace(WORK, responses=8)
    problem = a_problem((generator,), hardware_of(1, 1, memory_bytes=memory), work)
    (plan,) = search(problem).plans
    (call,) = [call for call in plan.calls if call.verb == "generate"]
    assert call.note == f"{waves} wave{'s' * (waves > 1)} of {at_once} responses"
    assert plan.slots == at_once
    assert plan.pools[0].peak_bytes == TINY_WEIGHTS * (2 + 2) + at_once * row <= memory
    with pytest.raises(Infeasible, match=r"actor generate needs .*; offload=\('actor',\) would free the most memory"):
        search(replace(problem, hardware=hardware_of(1, 1, memory_bytes=TINY_WEIGHTS * (2 + 2) + 0.99 * row)))


def test_what_waits_in_host_memory_waits_only_where_it_has_to():
    reference = replace(REFERENCE, model=SMALL, passes=2)
    tight = hardware_of(1, 1, memory_bytes=LEARNER_BYTES + SMALL_WEIGHTS)
    problem = a_problem((LEARNER, reference), tight, LONG, offloads=((), ("reference",), ("actor", "reference")))
    (plan,) = search(problem).plans
    assert plan.offload == ("reference",)
    ((call, host_s),) = [(call, call.cost.host_s) for call in plan.calls if call.verb == "offload"]
    assert (call.stage, call.role) == ("prepare", "reference")
    assert host_s == pytest.approx(2 * (2 * SMALL_WEIGHTS * 2) / 1e9)  # in and out, for both passes
    (ample,) = search(replace(problem, hardware=hardware_of(1, 1))).plans
    assert ample.offload == ()
    assert plan.seconds - ample.seconds == pytest.approx(host_s)


def test_a_role_that_does_nothing_is_placed():
    idle = Role("idle", TINY, "lm", passes=0)
    (plan,) = search(a_problem((idle,), hardware_of(1, 1))).plans
    assert (plan.calls, plan.seconds, plan.slots) == ((), 0.0, None)
    (pool,) = plan.pools
    assert (pool.roles, pool.peak_bytes, pool.peak_during) == (("idle",), TINY_WEIGHTS * 2, "no call")
    beside = search(a_problem((REFERENCE, idle), hardware_of(1, 1))).plans[0]
    alone = search(a_problem((REFERENCE,), hardware_of(1, 1))).plans[0]
    assert beside.calls == alone.calls
    assert beside.pools[0].peak_bytes == alone.pools[0].peak_bytes + TINY_WEIGHTS * 2
    assert beside.pools[0].peak_during == alone.pools[0].peak_during == "reference infer"


# Seconds by hand.


def test_a_pool_within_a_machine_never_meets_the_network():
    hardware = hardware_of(2, 4, network_bytes_per_s=1e-9, network_latency_s=1e9)
    roles = replace(ACTOR, generates=False), replace(REFERENCE, passes=2)
    layouts = {"actor": (Layout(fsdp=3),), "reference": (Layout(fsdp=2), Layout(fsdp=8))}
    # Groups of 3 do not divide machines of 4, but the first pool is inside one machine.
    problem = a_problem(roles, hardware, layouts=layouts, pools=((("actor",), 3), (("reference",), 4)))
    assert all(call.cost.collective_s < 1 for plan in search(problem).plans for call in plan.calls)
    over_both = replace(problem, pools=((("actor", "reference"), 8),), layouts={"reference": (Layout(fsdp=8),)})
    (plan,) = search(over_both).plans
    (scored,) = {call.cost for call in plan.calls if call.role == "reference"}
    assert scored.collective_s > 1e9


@pytest.mark.parametrize(("shape", "shared", "rate"), [((1, 4), False, 500), ((1, 4), True, 500), ((2, 2), False, 50)])
def test_weights_move_to_a_rollout_over_what_lies_between_the_pools(shape, shared, rate):
    rates = {"link_bytes_per_s": 1000.0, "network_bytes_per_s": 100.0, "link_efficiency": 0.5}
    pools = ((("actor", "reference"), 2), ((ROLLOUT,), 2))
    problem = a_problem((ACTOR, REFERENCE), hardware_of(*shape, **rates, shared_compute=shared), pools=pools)
    # Two devices send and two receive all weights in two bytes each, or half of them if a replica has two shards.
    for given, received in ((Layout(), TINY_WEIGHTS * 2), (Layout(generation_tensor=2), TINY_WEIGHTS)):
        (plan,) = search(replace(problem, layouts={"actor": (given,)})).plans
        ((call, seconds),) = [(call, call.cost.collective_s) for call in plan.calls if call.verb == "move"]
        assert (call.stage, call.role, call.pool) == ("generate", ROLLOUT, 1)
        assert seconds == pytest.approx(received / rate)
    (plan,) = search(replace(problem, pools=((pools[0][0], 1), pools[1]), layouts={"actor": (Layout(),)})).plans
    (seconds,) = [call.cost.collective_s for call in plan.calls if call.verb == "move"]
    assert seconds == pytest.approx(2 * TINY_WEIGHTS * 2 / rate)  # one device sends to two, and the fourth is idle


def test_an_actor_that_does_not_generate_keeps_a_layout_of_replicas_larger_than_its_pool():
    given = Layout(generation_tensor=2)
    pools = ((("actor", "reference"), 1), ((ROLLOUT,), 2))
    (plan,) = search(a_problem((ACTOR, REFERENCE), hardware_of(1, 4), pools=pools, layouts={"actor": (given,)})).plans
    layouts = {pool.roles: pool.layouts for pool in plan.pools}
    assert layouts["actor", "reference"]["actor"] == replace(given, data=1)
    assert layouts[(ROLLOUT,)][ROLLOUT].generation_tensor == 2
    # The actor's pool of one device cannot hold such a replica.
    together = ((("actor",), 1), (("reference",), 2))
    with pytest.raises(Infeasible, match="the layout set for actor does not fill 1 x made"):
        search(a_problem((ACTOR, REFERENCE), hardware_of(1, 4), pools=together, layouts={"actor": (given,)}))


# Placements by hand.


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"roles": (REFERENCE,), "pools": ((("reference",), 1), ((ROLLOUT,), 1))},
            "no role generates, but a pool places rollout",
        ),
        ({"pools": ((("actor",), 3), (("reference",), 2))}, r"pools have \[3, 2\] devices, but only 4 devices exist"),
        (
            {"pools": ((("actor", "reference"), 3),), "devices_per_host": 2},
            r"have \[3\] devices, but must have whole hosts of 2",
        ),
        ({"devices_per_host": 8}, "have no pool of whole hosts of 8 devices"),
        ({"devices_per_host": 3, "hardware": hardware_of(2, 4)}, "have no pool of whole hosts of 3 devices"),
        ({"hardware": hardware_of(513, 8)}, "at most 4096 devices, got 4104"),
    ],
)
def test_devices_that_pools_or_hosts_do_not_divide_are_refused(change, message):
    problem = a_problem((ACTOR, REFERENCE), hardware_of(1, 4))
    with pytest.raises(ValueError, match=message) as refusal:
        search(replace(problem, **change))
    assert not isinstance(refusal.value, Infeasible)


def test_pools_that_keep_together_what_has_to_be_are_taken():
    problem = a_problem((ACTOR, REFERENCE), hardware_of(1, 4), together=(("actor", "reference"),), devices_per_host=2)
    (plan,) = search(replace(problem, pools=((("reference", "actor"), 2), ((ROLLOUT,), 2)))).plans
    assert {pool.roles: pool.devices for pool in plan.pools} == {("actor", "reference"): 2, (ROLLOUT,): 2}
