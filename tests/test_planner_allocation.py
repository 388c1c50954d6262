"""Devices for pools against every distribution there is, and placements that arithmetic by hand predicts."""

import itertools
import math
import random
from dataclasses import replace

import pytest
from made_plans import HELD_ONCE, machines

from jaxrlhf.config import ROLLOUT, Layout
from jaxrlhf.models.config import ModelConfig
from jaxrlhf.planner.hardware import Hardware
from jaxrlhf.planner.plan import Infeasible, PlacementPlan, PlacementProblem
from jaxrlhf.planner.search.allocation import allocate, stage_seconds
from jaxrlhf.planner.search.mapping import placements, search
from jaxrlhf.planner.search.pool_options import Point
from jaxrlhf.planner.workload import Role, Software, Workload

# Attention 4 * (4 + 8) + 16 = 64, MLP 96, norms 8: 168 in each of 2 layers; embedding and head 32 each, last norm 4.
TINY = ModelConfig("llama", 8, 4, 8, 2, 2, 2, 2)
TINY_WEIGHTS = 404
# Attention 4e6, MLP 9e6, norms 2e3 in each of 10 layers; embedding and head 1e6 each, last norm 1e3.
SMALL = ModelConfig("llama", 1000, 1000, 3000, 10, 10, 10, 100)
SMALL_WEIGHTS = 132_021_000
WORK = Workload(prompts=4, responses=4, prompt_tokens=4.0, response_tokens=4.0, longest_tokens=10, updates=2)
PLAIN = Software(**HELD_ONCE, decode_tokens_per_dispatch=None, skips_masked=False)
"""Nothing exists twice, and programs start for free."""
ACTOR = Role("actor", TINY, "lm", generates=True, passes=0, trained=True)
REFERENCE = Role("reference", TINY, "lm")


def hardware_of(count: int, machine: int, **changes) -> Hardware:
    """Memory is full when it is full, nothing has a delay, and links cost nothing."""
    free = dict.fromkeys(("link_latency_s", "network_latency_s", "layer_overhead_s", "dispatch_overhead_s"), 0.0)
    free |= {"link_bytes_per_s": 1e30, "network_bytes_per_s": 1e30, "usable_memory": 1.0, "memory_bytes": 1e15}
    return machines(machines=count, devices_per_machine=machine, **{**free, **changes})


def a_problem(roles: tuple[Role, ...], hardware: Hardware, work: Workload = WORK, **changes) -> PlacementProblem:
    return PlacementProblem(roles, work, PLAIN, hardware, **changes)


def pools_of(plan: PlacementPlan) -> list[tuple[tuple[str, ...], int]]:
    return [(pool.roles, pool.devices) for pool in plan.pools]


# Set partitions.


@pytest.mark.parametrize(("count", "bell"), [(1, 1), (2, 2), (3, 5), (4, 15), (5, 52), (6, 203)])
def test_there_are_as_many_placements_as_set_partitions(count, bell):
    roles = tuple(replace(REFERENCE, name=f"role_{n}") for n in range(count))
    problem = a_problem(roles, hardware_of(1, 2))
    found = {frozenset(map(frozenset, pools)) for pools in placements(problem)}
    assert len(list(placements(problem))) == len(found) == search(problem, keep=1).placements == bell
    assert all(sorted(itertools.chain(*pools)) == [role.name for role in roles] for pools in found)
    if count < 3:
        return
    tied = list(placements(replace(problem, together=(("role_0", "role_2"),))))
    assert len(tied) == {3: 2, 4: 5, 5: 15, 6: 52}[count]  # those of one role fewer
    assert all(any({"role_0", "role_2"} <= set(pool) for pool in pools) for pools in tied)


def test_a_rollout_apart_is_placed_as_one_more_role():
    problem = a_problem((ACTOR, REFERENCE), hardware_of(1, 4), rollout_apart=True)
    assert search(problem, keep=1).placements == 5
    assert {name for pools in placements(problem) for pool in pools for name in pool} == {
        *("actor", "reference"),
        ROLLOUT,
    }
    assert list(placements(replace(problem, pools=((("reference", "actor"), 2),)))) == [(("reference", "actor"),)]


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


def test_pools_without_room_have_no_allocation():
    hardware = machines(machines=1, devices_per_machine=4)
    one = [Point(("a",), 3, (1.0, 1.0, 1.0), (), None)]
    assert allocate([one, []], hardware, within=math.inf) == (None, 0)
    assert allocate([one, one], hardware, within=math.inf)[0] is None
    found, _ = allocate([one], hardware, within=math.inf)
    assert found is not None
    assert allocate([one], hardware, within=found.seconds)[0] is None  # no better than what is known


def test_stages_wait_for_the_slowest_pool():
    pools = [(1.0, 5.0, 2.0), (4.0, 1.0, 3.0)]
    assert stage_seconds(pools, shared=False) == [4, 5, 3]
    assert sum(stage_seconds(pools, shared=True)) == 16


# Bytes by hand.


def test_the_peak_of_a_pool_counts_what_every_role_holds():
    layouts = {"actor": (Layout(tensor=2),), "reference": (Layout(tensor=2),)}
    problem = a_problem((ACTOR, REFERENCE), hardware_of(1, 2), layouts=layouts)
    plans = {pools: plan for plan in search(problem).plans for pools in [tuple(pools_of(plan))]}
    (pool,) = plans[((("actor", "reference"), 2),)].pools
    held = TINY_WEIGHTS // 2
    # 8 tokens, in float16: residual streams into 2 layers, and of one layer 8 and the inputs of 2 norms whole, and 16
    # of heads, 48 of the MLP and in float32 4 of mixed heads split in 2; scores of half the 8 tokens in float32,
    # weights in float16 and both gradients, of a head on each device. Logits take less, and are gone by then.
    activations = 8 * ((2 * 4 + 8 + 8 + (16 + 48) // 2) * 2 + 4 * 4 // 2 + 4 * (4 + 2) * 2)
    assert pool.peak_during == "actor update"
    assert pool.peak_bytes == held * (4 + 4 + 8) + activations + held * 2
    # 4 responses of 10 tokens in 2 replicas of the whole policy, each 2 layers' 2 keys and values of 2 heads.
    many = replace(problem, workload=replace(WORK, responses=40, updates=20))
    (pool,) = next(plan for plan in search(many).plans if len(plan.pools) == 1).pools
    assert pool.peak_during == "actor generate"
    cache = 20 * 10 * (2 * 2 * 2 * 2 * 2)
    assert pool.peak_bytes == held * (4 + 8) + TINY_WEIGHTS * 2 + cache + held * 2


@pytest.mark.parametrize(("rows", "waves", "at_once"), [(8.5, 1, 8), (7.5, 2, 4), (2.5, 4, 2), (1.0, 8, 1)])
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
    with pytest.raises(Infeasible, match=r"actor generate needs .*; offload=\('actor',\) would free most"):
        search(replace(problem, hardware=hardware_of(1, 1, memory_bytes=TINY_WEIGHTS * (2 + 2) + 0.99 * row)))


def test_a_layout_that_is_slower_wins_where_it_leaves_room_for_the_cache():
    generator, software = replace(ACTOR, trained=False), replace(PLAIN, skips_masked=True)
    row = 40 * (2 * 2 * 2 * 2 * 2)
    # Beside a whole frozen reference one row of the cache fits, beside half of it two.
    memory = TINY_WEIGHTS * (2 + 2) + TINY_WEIGHTS + 2 * row + 10
    layouts = {"actor": (Layout(),), "reference": (Layout(), Layout(fsdp=2))}
    work, pools = replace(WORK, longest_tokens=40), ((("actor", "reference"), 2),)
    found = {}
    for name, rate in (("fast", 1e30), ("slow", 1e-3)):
        hardware = hardware_of(1, 2, memory_bytes=memory, link_bytes_per_s=rate, layer_overhead_s=1.0)
        problem = PlacementProblem((generator, REFERENCE), work, software, hardware, layouts=layouts, pools=pools)
        (plan,) = search(problem).plans
        notes = [call.note for call in plan.calls if call.verb == "generate"]
        found[name] = plan.pools[0].layouts["reference"].fsdp, *notes
    assert found == {
        "fast": (2, "1 wave of 2 responses on each of 2 replicas"),
        "slow": (1, "2 waves of 1 responses on each of 2 replicas"),
    }


def test_more_devices_take_fewer_waves_of_the_same_size():
    row = 10 * (2 * 2 * 2 * 2 * 2)
    hardware = hardware_of(1, 4, memory_bytes=TINY_WEIGHTS * (2 + 2) + 2.5 * row)
    work, layouts = replace(WORK, responses=16), {"actor": (Layout(),)}
    problem = a_problem((replace(ACTOR, trained=False),), hardware, work, layouts=layouts)
    for devices, note in ((1, "8 waves of 2 responses"), (4, "2 waves of 2 responses on each of 4 replicas")):
        (plan,) = search(replace(problem, hardware=replace(hardware, devices_per_machine=devices))).plans
        assert plan.pools[0].devices == devices
        assert [call.note for call in plan.calls if call.verb == "generate"] == [note]


LONG = Workload(prompts=8, responses=8, prompt_tokens=50.0, response_tokens=50.0, longest_tokens=100)
LEARNER = Role("actor", SMALL, "lm", passes=0, trained=True)
# 100 tokens in float16: inputs of 10 layers; of one 4000 + 4000 of heads + 12000 of the MLP; 1000 scores in float32,
# as many weights in float16 and the gradients of both.
LEARNER_BYTES = SMALL_WEIGHTS * (4 + 4 + 8) + 100 * ((10 * 1000 + 20_000) * 2 + 1000 * 12) + 2 * 100 * 1000 * 4


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
    # Groups of 3 do not divide machines of 4, and the first pool lies in one all the same.
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
    # Two replicas and two that send: each receives the weights in two bytes. Of one in two shards, half of them.
    for given, received in ((Layout(), TINY_WEIGHTS * 2), (Layout(generation_tensor=2), TINY_WEIGHTS)):
        (plan,) = search(replace(problem, layouts={"actor": (given,)})).plans
        ((call, seconds),) = [(call, call.cost.collective_s) for call in plan.calls if call.verb == "move"]
        assert (call.stage, call.role, call.pool) == ("generate", ROLLOUT, 1)
        assert seconds == pytest.approx(received / rate)
    (plan,) = search(replace(problem, pools=((pools[0][0], 1), pools[1]), layouts={"actor": (Layout(),)})).plans
    (seconds,) = [call.cost.collective_s for call in plan.calls if call.verb == "move"]
    assert seconds == pytest.approx(2 * TINY_WEIGHTS * 2 / rate)  # one sends to two, and the fourth device idles


def test_an_actor_that_does_not_generate_keeps_a_layout_of_replicas_larger_than_its_pool():
    given = Layout(generation_tensor=2)
    pools = ((("actor", "reference"), 1), ((ROLLOUT,), 2))
    (plan,) = search(a_problem((ACTOR, REFERENCE), hardware_of(1, 4), pools=pools, layouts={"actor": (given,)})).plans
    layouts = {pool.roles: pool.layouts for pool in plan.pools}
    assert layouts["actor", "reference"]["actor"] == replace(given, data=1)
    assert layouts[(ROLLOUT,)][ROLLOUT].generation_tensor == 2
    # The actor's own pool, of 1 device, holds no such replica.
    together = ((("actor",), 1), (("reference",), 2))
    with pytest.raises(Infeasible, match="the layout that is given for actor does not fill 1 x made"):
        search(a_problem((ACTOR, REFERENCE), hardware_of(1, 4), pools=together, layouts={"actor": (given,)}))


# Placements by hand.


def test_where_scaling_is_free_all_share_all_devices():
    model = replace(TINY, vocab_size=16, num_heads=4, num_kv_heads=4)
    critic, reward = Role("critic", model, "value", trained=True), Role("reward", model, "score")
    roles = (replace(ACTOR, model=model), critic, replace(REFERENCE, model=model), reward)
    found = search(a_problem(roles, hardware_of(1, 4), replace(WORK, responses=8)), keep=15)
    assert pools_of(found.plans[0]) == [(("actor", "critic", "reference", "reward"), 4)]
    assert found.plans[0].seconds < found.plans[1].seconds * 0.999


def test_where_the_network_is_slow_models_keep_to_their_machines():
    large, small = LEARNER, Role("critic", replace(SMALL, num_layers=8), "value", passes=0, trained=True)
    fast = a_problem((large, small), hardware_of(2, 2), LONG)
    assert pools_of(search(fast).plans[0]) == [(("actor", "critic"), 4)]
    slow = replace(fast, hardware=hardware_of(2, 2, network_bytes_per_s=1e-3))
    assert sorted(pools_of(search(slow).plans[0])) == [(("actor",), 2), (("critic",), 2)]


def test_a_critic_larger_than_the_actor_has_more_devices_where_they_are_apart():
    small = replace(LEARNER, model=replace(SMALL, num_layers=2))
    critic = Role("critic", SMALL, "value", passes=0, trained=True)
    found = search(a_problem((small, critic), hardware_of(1, 4), LONG))
    apart = next(plan for plan in found.plans if len(plan.pools) == 2)
    assert {pool.roles: pool.devices for pool in apart.pools} == {("critic",): 3, ("actor",): 1}


def test_a_machine_of_six_is_cut_unevenly_where_that_is_fastest():
    # Of 8 sequences each device has 2 on 4 devices or on 6, 4 on 2, 3 on 3; the critic's take twice as long:
    # 4 | 2 take 4, while 6 for both take 2 * (2 + 1), and 3 | 3 take 3 * 2.
    actor = replace(LEARNER, model=replace(SMALL, num_layers=5), rows_per_microbatch=1)
    critic = Role("critic", SMALL, "value", passes=0, trained=True, rows_per_microbatch=1)
    layouts = {"actor": (Layout(),), "critic": (Layout(),)}
    problem = a_problem((actor, critic), hardware_of(1, 6, memory_bytes_per_s=1e30), LONG, layouts=layouts)
    best = search(problem).plans[0]
    assert pools_of(best) == [(("critic",), 4), (("actor",), 2)]
    for pools, ratio in (
        (((("actor", "critic"), 6),), 6 / 4),
        (((("actor",), 3), (("critic",), 3)), 6 / 4),
        (((("actor",), 1), (("critic",), 5)), 8 / 4),
    ):
        (even,) = search(replace(problem, pools=pools)).plans
        assert even.seconds / best.seconds == pytest.approx(ratio, rel=0.02)  # but for embeddings


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"roles": (ACTOR, ACTOR)}, "need names that differ"),
        ({"roles": (replace(ACTOR, name=ROLLOUT),)}, "none may be 'rollout'"),
        ({"roles": (REFERENCE,), "rollout_apart": True}, "one role generates for a rollout, here none does"),
        (
            {"roles": (REFERENCE,), "pools": ((("reference",), 1), ((ROLLOUT,), 1))},
            "one role generates for a rollout, here none does",
        ),
        ({"roles": (ACTOR, replace(ACTOR, name="other"))}, r"one role generates .* \['actor', 'other'\]"),
        ({"together": (("actor", "critic"),)}, r"name \['critic'\], and the roles are \['actor', 'reference'\]"),
        ({"layouts": {"reward": (Layout(),)}}, r"name \['reward'\], and the roles are \['actor', 'reference'\]"),
        ({"layouts": {ROLLOUT: (Layout(),)}, "rollout_apart": True}, r"name \['rollout'\]"),
        ({"pools": ((("actor",), 2),)}, "each has to be placed once"),
        ({"pools": ((("actor", "reference", "critic"), 2),)}, "each has to be placed once"),
        ({"pools": ((("actor", "reference"), 2), (("reference",), 1))}, "each has to be placed once"),
        ({"pools": ((("actor", "reference", "actor"), 2),)}, "each has to be placed once"),
        (
            {"pools": ((("actor", "reference"), 2), ((ROLLOUT,), 1), ((ROLLOUT,), 1))},
            "each has to be placed once",
        ),
        ({"pools": ((("actor",), 3), (("reference",), 2))}, r"pools take \[3, 2\] devices; .* there are 4 in all"),
        ({"pools": ((("actor",), 4), (("reference",), 0))}, r"pools take \[4, 0\] devices; each needs 1 or more"),
        ({"pools": ((("actor",), 5), (("reference",), -1))}, r"pools take \[5, -1\] devices; each needs 1 or more"),
        ({"pools": ((("actor", "reference"), 3),), "devices_per_host": 2}, r"take \[3\] devices, and hosts have 2"),
        (
            {"pools": ((("actor", ROLLOUT), 2), (("reference",), 2))},
            "a pool places actor and rollout; drop rollout, or place it on another pool",
        ),
        (
            {"pools": ((("actor",), 2), (("reference",), 2)), "together": (("actor", "reference"),)},
            "actor and reference have to share a pool, and pools place them apart",
        ),
        ({"devices_per_host": 8}, "hold no pool of whole hosts of 8 devices"),
        ({"devices_per_host": 3, "hardware": hardware_of(2, 4)}, "hold no pool of whole hosts of 3 devices"),
        ({"hardware": hardware_of(513, 8)}, "4104 devices were asked for; the search goes up to 4096"),
    ],
)
def test_problems_that_contradict_themselves_are_refused(change, message):
    problem = a_problem((ACTOR, REFERENCE), hardware_of(1, 4))
    with pytest.raises(ValueError, match=message) as refusal:
        search(replace(problem, **change))
    assert not isinstance(refusal.value, Infeasible)
    assert search(problem).plans


@pytest.mark.parametrize("keep", [0, -1])
def test_a_search_keeps_a_plan_or_more(keep):
    problem = a_problem((ACTOR, REFERENCE), hardware_of(1, 4))
    with pytest.raises(ValueError, match=f"keep={keep} plans are none; ask for 1 or more"):
        search(problem, keep=keep)
    assert len(search(problem, keep=1).plans) == 1


def test_pools_that_keep_together_what_has_to_be_are_taken():
    problem = a_problem((ACTOR, REFERENCE), hardware_of(1, 4), together=(("actor", "reference"),), devices_per_host=2)
    (plan,) = search(replace(problem, pools=((("reference", "actor"), 2), ((ROLLOUT,), 2)))).plans
    assert {pool.roles: pool.devices for pool in plan.pools} == {("actor", "reference"): 2, (ROLLOUT,): 2}
