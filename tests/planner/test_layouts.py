"""Layouts of the search, compared with all even splits and with meshes that run them."""

import dataclasses
import itertools
import math

import jax
import numpy as np
import pytest
from made_plans import machines

from jaxrlhf.config import Layout
from jaxrlhf.models.config import Experts, ModelConfig
from jaxrlhf.models.parameters import param_dims, param_shapes
from jaxrlhf.planner.plan import PlacementProblem
from jaxrlhf.planner.search.layouts import (
    generation_layouts,
    pool_sizes,
    role_layouts,
    switches,
    training_layouts,
)
from jaxrlhf.planner.workload import Role, Software, Workload
from jaxrlhf.sharding.mesh import AXES, factored_mesh, generation_mesh
from jaxrlhf.sharding.rules import GENERATE, TRAIN, check_divisible

MODELS = {
    "even": ModelConfig("qwen2", 32, 16, 64, 4, 8, 8, 2),
    "few key-value heads": ModelConfig("qwen2", 32, 16, 64, 4, 8, 2, 2, qkv_bias=True),
    "odd layers": ModelConfig("llama", 48, 16, 64, 3, 4, 4, 2),
    "odd vocabulary": ModelConfig("llama", 33, 16, 64, 4, 4, 4, 2, tie_embeddings=True),
    "vocabulary of 4": ModelConfig("llama", 4, 16, 64, 8, 4, 4, 2),
    "odd width": ModelConfig("qwen3", 32, 6, 64, 2, 4, 4, 2, qk_norm=True),
    "inner width of 6": ModelConfig("qwen2", 32, 16, 6, 2, 4, 4, 2),
    "one of each": ModelConfig("qwen2", 7, 5, 3, 1, 1, 1, 2),
}
QWEN_7B = ModelConfig("qwen2", 152_064, 3584, 18_944, 28, 28, 4, 128)
LLAMA_70B = ModelConfig("llama", 128_256, 8192, 28_672, 80, 64, 8, 128)
every_model = pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)


def actor(model: ModelConfig, **changes) -> Role:
    return Role("actor", model, "lm", generates=True, trained=True, **changes)


def trained(model: ModelConfig, devices: int, hardware, *, fsdp=True, **changes) -> list[Layout]:
    return list(training_layouts(actor(model, **changes), devices, hardware, fsdp=fsdp))


def sizes(layout: Layout) -> tuple[int | None, int, int, int]:
    return layout.data, layout.fsdp, layout.stage, layout.tensor


def factorisations(devices: int) -> list[tuple[int, int, int, int]]:
    """Return all data, fsdp, stage and tensor sizes whose product is the number of devices."""
    numbers = [n for n in range(1, devices + 1) if devices % n == 0]
    return [four for four in itertools.product(numbers, repeat=4) if math.prod(four) == devices]


def refused(check, *arguments, **named) -> bool:
    try:
        check(*arguments, **named)
    except ValueError:
        return True
    return False


def replicas(mesh: jax.sharding.Mesh, axes: tuple[str, ...]) -> np.ndarray:
    """Return the indices of devices that differ only along some axes, a row for each group."""
    number_of = {device: number for number, device in enumerate(jax.devices())}
    numbers = np.vectorize(number_of.__getitem__)(mesh.devices)
    within = [AXES.index(axis) for axis in axes]
    others = [place for place in range(len(AXES)) if place not in within]
    return numbers.transpose(others + within).reshape(-1, math.prod(mesh.shape[axis] for axis in axes))


def in_one(numbers: np.ndarray, machine: int) -> bool:
    """Return whether each row is inside one machine."""
    return bool((numbers // machine == numbers[:, :1] // machine).all())


# Training.


@every_model
@pytest.mark.parametrize("devices", [4, 8])
def test_on_one_machine_the_layouts_are_those_that_the_mesh_and_the_rules_accept(model, devices):
    dims, shapes = param_dims(model, "lm"), param_shapes(model, "lm")
    accepted = set()
    for data, fsdp, stage, tensor in factorisations(devices):
        mesh = factored_mesh(Layout(data, fsdp, stage, tensor), jax.devices()[:devices])
        if not refused(check_divisible, mesh, dims, shapes, TRAIN, role="actor"):
            accepted.add((data, fsdp, stage, tensor))
    found = [sizes(layout) for layout in trained(model, devices, machines(machines=1, devices_per_machine=8))]
    assert len(set(found)) == len(found)
    assert set(found) == accepted


@pytest.mark.parametrize("model", [*MODELS.values(), QWEN_7B, LLAMA_70B])
@pytest.mark.parametrize("machine", [4, 6])
def test_the_layouts_are_all_that_fill_the_devices_and_divide_every_dimension(model, machine):
    count = 4
    for fsdp, within_machine, fast in itertools.product([True, False], repeat=3):
        hardware = machines(machines=count, devices_per_machine=machine, network_bytes_per_s=1e9 if fast else 1e8)
        for devices in {machine, machine * count}:
            found = trained(model, devices, hardware, fsdp=fsdp, within_machine=within_machine)
            expected = set()
            for data, shards, stage, tensor in factorisations(devices):
                rows = -(-model.vocab_size // 16) * 16  # tables are padded
                divides = (
                    *(model.num_heads % tensor, model.intermediate_size % tensor),
                    *(model.num_layers % stage, rows % (stage * tensor), model.hidden_size % shards),
                )
                inside = machine % tensor == 0
                over_machines = fast and not within_machine and tensor % machine == 0 and tensor <= max(16, machine)
                apart = within_machine and machine % (stage * tensor * shards) != 0
                if not any(divides) and (inside or over_machines) and not apart and (fsdp or shards == 1):
                    expected.add((data, shards, stage, tensor))
            assert {sizes(layout) for layout in found} == expected
            assert len(found) == len(expected)
            assert {(layout.generation_stage, layout.generation_tensor) for layout in found} == {(1, 1)}


def test_experts_are_split_by_their_own_width():
    model = ModelConfig("qwen3", 32, 16, 64, 2, 8, 8, 2, experts=Experts(4, 2, intermediate_size=6))
    assert {layout.tensor for layout in trained(model, 8, machines(machines=1, devices_per_machine=8))} == {1, 2}


# Generation.


@every_model
def test_replicas_on_one_machine_are_those_that_the_mesh_and_the_rules_accept(model):
    dims, shapes = param_dims(model, "lm"), param_shapes(model, "lm")
    accepted = set()
    for stage, tensor in itertools.product([1, 2, 4, 8], repeat=2):
        layout = Layout(generation_stage=stage, generation_tensor=tensor)
        if refused(generation_mesh, layout, jax.devices()):
            continue
        mesh = generation_mesh(layout, jax.devices())
        if not refused(check_divisible, mesh, dims, shapes, GENERATE, role="actor"):
            accepted.add((stage, tensor))
    found = list(generation_layouts(actor(model), 8, machines(machines=1, devices_per_machine=8)))
    assert len(set(found)) == len(found)
    assert set(found) == accepted


@every_model
@pytest.mark.parametrize("machine", [2, 4])
def test_every_layout_of_the_search_runs_and_generates_within_machines(model, machine):
    hardware = machines(machines=8 // machine, devices_per_machine=machine, network_bytes_per_s=2e9)
    dims, shapes = param_dims(model, "lm"), param_shapes(model, "lm")
    taken = 0
    for layout in trained(model, 8, hardware):
        for stage, tensor in generation_layouts(actor(model), 8, hardware):
            whole = Layout(*sizes(layout), stage, tensor)
            check_divisible(factored_mesh(whole, jax.devices()), dims, shapes, TRAIN, role="actor")
            mesh = generation_mesh(whole, jax.devices())
            check_divisible(mesh, dims, shapes, GENERATE, role="actor")
            inside = in_one(replicas(mesh, ("stage", "tensor")), machine)
            allowed = switches(layout, stage, tensor, within=machine)
            taken += allowed
            assert inside == allowed
    assert taken >= len(trained(model, 8, hardware))  # each at least with whole copies of the policy


@pytest.mark.parametrize("machine", [2, 4, 8])
def test_replicas_that_share_a_cache_lie_within_machines(machine):
    hardware = machines(machines=8 // machine, devices_per_machine=machine, network_bytes_per_s=2e9)
    seen = set()
    for layout in training_layouts(actor(MODELS["even"]), 8, hardware, fsdp=True, context=True):
        for context, tensor in itertools.product([1, 2, 4], [1, 2]):
            whole = dataclasses.replace(layout, generation_context=context, generation_tensor=tensor)
            inside = in_one(replicas(generation_mesh(whole, jax.devices()), ("context", "stage", "tensor")), machine)
            assert switches(layout, 1, tensor, within=machine, context=context) == inside, whole
            seen.add((layout.context > 1, inside))
    assert seen == {(True, True), (True, False), (False, True), (False, False)} or machine == 8


def test_a_cache_of_long_sequences_is_shared_where_no_more_heads_can_be_split():
    one = machines(machines=1, devices_per_machine=8)
    role = actor(MODELS["few key-value heads"])
    problem = a_problem(role, one)
    assert {own.generation_context for own in role_layouts(problem, role, 8, generates=True)} == {1}
    problem = dataclasses.replace(problem, workload=dataclasses.replace(problem.workload, longest_tokens=8192))
    found = {
        (own.generation_tensor, own.generation_context)
        for own in role_layouts(problem, role, 8, generates=True)
        if own.generation_stage == 1
    }
    heads = role.model.num_kv_heads
    assert found == {
        (tensor, context)
        for tensor, context in itertools.product([1, 2, 4, 8], repeat=2)
        if context == 1 or (tensor % heads == 0 and tensor * context <= 8)
    }
    assert any(context > 1 for _, context in found)
    assert {own.generation_context for own in role_layouts(problem, role, 8)} == {1}


def test_replicas_divide_a_machine_so_that_none_straddles_two():
    # 3 stages would divide 12 devices and fit a machine of 4, and devices 3, 4 and 5 are on two machines.
    hardware = machines(machines=3, devices_per_machine=4)
    assert set(generation_layouts(actor(MODELS["odd layers"]), 12, hardware)) == {(1, 1), (1, 2), (1, 4)}


# Roles.


def a_problem(role: Role, hardware, **changes) -> PlacementProblem:
    work = Workload(prompts=1, responses=1, prompt_tokens=1.0, response_tokens=1.0, longest_tokens=2)
    return PlacementProblem((role,), work, Software(), hardware, **changes)


def test_layouts_that_are_given_are_those_that_fill_the_pool():
    role, one = actor(MODELS["even"]), machines(machines=1, devices_per_machine=8)
    given = (Layout(), Layout(data=4), Layout(data=2, tensor=4), Layout(fsdp=3), Layout(fsdp=16), Layout(stage=4))
    on = {n: list(role_layouts(a_problem(role, one, layouts={"actor": given}), role, n)) for n in (1, 4, 6, 8)}
    assert on == {
        1: [Layout(1)],
        4: [Layout(4), Layout(4), Layout(1, 1, 4)],
        6: [Layout(6), Layout(2, 3)],
        8: [Layout(8), Layout(2, 1, 1, 4), Layout(2, 1, 4)],
    }
    # A role of another name keeps all that the search has.
    other = dataclasses.replace(role, name="reference")
    whole = list(role_layouts(a_problem(other, one, layouts={"actor": given}), other, 8))
    assert whole == trained(MODELS["even"], 8, one)
    assert list(role_layouts(a_problem(other, one, fsdp=False), other, 8)) == trained(
        MODELS["even"], 8, one, fsdp=False
    )


def test_the_sizes_of_generation_count_where_a_role_generates():
    role, one = actor(MODELS["even"]), machines(machines=1, devices_per_machine=8)
    given = (Layout(tensor=2, generation_tensor=2), Layout(fsdp=2, generation_stage=8), Layout(data=3, fsdp=8))
    problem = a_problem(role, one, layouts={"actor": given})
    first, second = Layout(2, 1, 1, 2, 1, 2), Layout(2, 2, 1, 1, 8, 1)
    assert list(role_layouts(problem, role, 4, generates=True)) == [first]
    # A rollout is apart: replicas of 8 do not divide this pool, and they need not.
    assert list(role_layouts(problem, role, 4)) == [first, second]
    # On the rollout's own pool it is all the same how training splits weights.
    apart = role_layouts(problem, role, 4, trains=False, generates=True)
    assert [(own.generation_stage, own.generation_tensor) for own in apart] == [(1, 2), (1, 1)]


@pytest.mark.parametrize("host", [None, 2])
def test_a_role_that_generates_has_every_pair_of_layouts_that_switches(host):
    role, hardware = actor(MODELS["even"]), machines(machines=2, devices_per_machine=4, network_bytes_per_s=2e9)
    problem, within = a_problem(role, hardware, devices_per_host=host), host or 4
    pairs = {
        (*sizes(layout), stage, tensor)
        for layout in trained(MODELS["even"], 8, hardware)
        for stage, tensor in itertools.product([1, 2, 4, 8], repeat=2)
        if stage * tensor <= within and stage <= 4 and switches(layout, stage, tensor, within=within)
    }
    found = list(role_layouts(problem, role, 8, generates=True))
    assert len(found) == len(pairs)
    assert {(*sizes(own), own.generation_stage, own.generation_tensor) for own in found} == pairs
    rollout = list(role_layouts(problem, role, 8, trains=False, generates=True))
    assert {(own.generation_stage, own.generation_tensor) for own in rollout} == {pair[4:] for pair in pairs}
    assert len(rollout) == len({pair[4:] for pair in pairs})


# Pools.


@pytest.mark.parametrize(
    ("count", "machine", "host", "expected"),
    [
        # Of one machine any number of devices, of several an even share of one, cut by its smallest prime again and
        # again, or whole ones; of both whole hosts.
        (1, 7, 1, [1, 2, 3, 4, 5, 6, 7]),
        (1, 6, 2, [2, 4, 6]),
        (1, 6, 8, []),
        (3, 4, 1, [1, 2, 4, 8, 12]),
        (2, 8, 4, [4, 8, 16]),
        (2, 8, 16, [16]),
        (2, 12, 1, [1, 3, 6, 12, 24]),
        (2, 15, 1, [1, 5, 15, 30]),
        (2, 6, 2, [6, 12]),
    ],
)
def test_pools_have_whole_hosts_of_a_machine_or_of_all(count, machine, host, expected):
    hardware = machines(machines=count, devices_per_machine=machine)
    assert pool_sizes(hardware, devices_per_host=host) == expected


@pytest.mark.parametrize(("count", "machine"), [(1, 8), (2, 4), (3, 4), (4, 2), (2, 6), (2, 12), (1, 15)])
def test_pools_taken_in_order_do_not_straddle_machines(count, machine):
    allowed = pool_sizes(machines(machines=count, devices_per_machine=machine))
    looked = 0
    for pools in range(1, 6):
        for chosen in itertools.combinations_with_replacement(sorted(allowed, reverse=True), pools):
            starts = list(itertools.accumulate(chosen, initial=0))
            if starts[-1] > count * machine:
                continue
            looked += 1
            for start, devices in zip(starts, chosen, strict=False):
                last = start + devices - 1
                assert start // machine == last // machine or start % machine == devices % machine == 0
    assert looked > 10
