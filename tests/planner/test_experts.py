"""Experts divided over devices: layouts, bytes and seconds, compared with meshes, arrays and XLA's collectives."""

import itertools
import math
import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from compiled import _INSTRUCTION, _groups, to_read
from jax.sharding import NamedSharding, PartitionSpec
from made_plans import machines
from unit_machines import HALVES, STEPS, UNIT, WORK, trained

from jaxrlhf import models
from jaxrlhf.config import Layout
from jaxrlhf.models.config import Experts, ModelConfig
from jaxrlhf.models.memory import inference_activation_bytes, training_activation_bytes, weights_held
from jaxrlhf.planner.cost.cost import Decoding, forward_cost, generation_cost, move_cost, switch_bytes, update_cost
from jaxrlhf.planner.cost.memory import weights_generating
from jaxrlhf.planner.search.layouts import generation_layouts, switches, training_layouts
from jaxrlhf.planner.workload import Role
from jaxrlhf.resharding.hybrid import HybridEngine
from jaxrlhf.sharding.described import described
from jaxrlhf.sharding.mesh import BATCH_AXES, EXPERT_AXES, TENSOR_AXES, factored_mesh, generation_mesh
from jaxrlhf.sharding.rules import GENERATE, TRAIN, check_divisible, shard_bytes, shardings
from jaxrlhf.sharding.submesh import submesh_of

MODEL = ModelConfig("qwen3_moe", 64, 32, 48, 2, 4, 4, 8, experts=Experts(4, 2, 16))
ROUTED = 2 * 4 * 3 * 32 * 16
"""Weights of all experts."""
REST = 2 * (4 * 32 * 32 + 32 * 4 + 2 * 32) + 2 * 64 * 32 + 32
VECTORS = 2 * (2 * 32 + 32 * 4) + 32
"""Weights of norms and routers, which not every axis splits."""
LAYOUTS = [
    Layout(2, expert=4), Layout(1, 2, expert=4), Layout(2, 2, expert=2), Layout(1, 2, 1, 2, 1, 1, 2),
    Layout(1, 2, 1, 2, 1, 2, 2), Layout(1, 1, 1, 2, 1, 2, 4),
]  # fmt: skip


def accepted(check, *arguments, **named) -> bool:
    try:
        check(*arguments, **named)
    except ValueError:
        return False
    return True


def compiled(model: ModelConfig, layout: Layout, shape: tuple[int, int], *, backward: bool = True, remat: bool = False):
    """Compile a pass over packed rows on eight devices, with the log-probabilities of training."""
    mesh = factored_mesh(layout, jax.devices())
    axes = {"row_axes": BATCH_AXES, "head_axes": TENSOR_AXES, "expert_axes": EXPERT_AXES}
    execution = replace(models.choose_execution(model, jnp.float32, mesh, **axes, remat=remat), mesh=mesh)
    execution = replace(execution, row_axes=BATCH_AXES)
    how = shardings(mesh, models.param_dims(model, "lm"), TRAIN)
    rows = NamedSharding(mesh, PartitionSpec(BATCH_AXES))
    token_RW = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=rows)

    def total(params, *ints):
        hidden_RWD = models.hidden_states(params, model, *ints, execution=execution).hidden_RWD
        return models.token_logp(params, model, hidden_RWD, ints[0]).logp.sum()

    program = jax.jit(jax.grad(total), out_shardings=how) if backward else jax.jit(total)
    params = described(models.param_shapes(model, "lm"), how)
    return to_read(program.lower(params, token_RW, token_RW, token_RW))


def actor(model: ModelConfig) -> Role:
    return Role("actor", model, "lm", generates=True, trained=True)


# Layouts.


@pytest.mark.parametrize("count", [1, 3, 4])
@pytest.mark.parametrize("devices", [4, 8])
def test_experts_are_divided_in_all_ways_that_the_mesh_and_the_rules_accept(count, devices):
    model = replace(MODEL, experts=Experts(count, 1, 16))
    dims, shapes = models.param_dims(model, "lm"), models.param_shapes(model, "lm")
    expected = set()
    for sizes in itertools.product([1, 2, 4, 8], repeat=4):
        data, fsdp, tensor, expert = sizes
        if math.prod(sizes) == devices:
            mesh = factored_mesh(Layout(data, fsdp, 1, tensor, expert=expert), jax.devices()[:devices])
            if accepted(check_divisible, mesh, dims, shapes, TRAIN, role="actor"):
                expected.add(sizes)
    one = machines(machines=1, devices_per_machine=8)
    found = list(training_layouts(actor(model), devices, one, fsdp=True))
    assert {(layout.data, layout.fsdp, layout.tensor, layout.expert) for layout in found} == expected
    assert len(found) == len(expected)
    assert {expert for *_, expert in expected} == {1: {1}, 3: {1}, 4: {1, 2, 4}}[count]
    # If each device has all weights, experts are not divided.
    assert {layout.expert for layout in training_layouts(actor(model), devices, one, fsdp=False)} == {1}


@pytest.mark.parametrize("machine", [2, 4, 8])
def test_replicas_with_divided_experts_lie_within_the_processes_that_can_run_them(machine):
    hardware = machines(machines=8 // machine, devices_per_machine=machine, network_bytes_per_s=2e9)
    seen = set()
    for layout in training_layouts(actor(MODEL), 8, hardware, fsdp=True):
        for stage, tensor in generation_layouts(actor(MODEL), 8, hardware):
            whole = replace(layout, generation_stage=stage, generation_tensor=tensor)
            runs = accepted(generation_mesh, whole, jax.devices()) and all(
                accepted(submesh_of, generation_mesh(whole, jax.devices()), jax.devices()[start : start + machine])
                for start in range(0, 8, machine)
            )
            if layout.expert > 1:
                assert switches(layout, stage, tensor, within=machine) == runs, whole
                seen.add(runs)
    assert seen == {True, False} or machine == 8


# Bytes.


@pytest.mark.parametrize("layout", LAYOUTS)
def test_devices_hold_and_generate_with_their_share_of_the_experts(layout):
    dims, shapes = models.param_dims(MODEL, "lm"), models.param_shapes(MODEL, "lm")
    held = shard_bytes(shapes, shardings(factored_mesh(layout, jax.devices()), dims, TRAIN)) / 4
    assert 0 <= held - weights_held(MODEL, "lm", layout) <= VECTORS
    generating = shard_bytes(shapes, shardings(generation_mesh(layout, jax.devices()), dims, GENERATE)) / 4
    assert 0 <= generating - weights_generating(MODEL, layout) <= VECTORS
    each = (REST + ROUTED / layout.expert) / layout.generation_tensor
    assert weights_generating(MODEL, layout) == pytest.approx(each)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_switch_moves_no_experts_along_the_axis_that_divides_them(layout):
    meshes = factored_mesh(layout, jax.devices()), generation_mesh(layout, jax.devices())
    shapes = models.param_shapes(MODEL, "lm", jnp.bfloat16)
    hybrid = HybridEngine.by_rules(*meshes, models.param_dims(MODEL, "lm"), shapes, dtype=jnp.bfloat16)
    assert abs(hybrid.bytes_per_device - switch_bytes(MODEL, layout, itemsize=2)) <= 2 * VECTORS
    if layout == LAYOUTS[0]:
        assert switch_bytes(MODEL, layout, itemsize=2) == pytest.approx(REST * 3 / 4 * 2)


@pytest.mark.parametrize("expert", [pytest.param(1, marks=pytest.mark.seeds), 8])
def test_experts_hold_the_tokens_of_all_who_share_them_about_as_xla_allocates(expert):
    model = ModelConfig("qwen3_moe", 512, 128, 256, 2, 4, 4, 32, experts=Experts(8, 4, 16))
    layout, sizes = Layout(8 // expert, expert=expert), {"tokens": 512, "row_tokens": 128, "itemsize": 4}
    programs = compiled(model, layout, (32, 128), remat=True), compiled(model, layout, (32, 128), backward=False)
    trains, scores = (program.memory_analysis().temp_size_in_bytes for program in programs)
    assert 0.7 < training_activation_bytes(model, "lm", layout, **sizes, remat=True) / trains < 1.5
    assert 0.7 < inference_activation_bytes(model, "lm", layout, **sizes) / scores < 1.5


def test_a_pool_that_generates_is_sent_each_expert_once_for_all_that_share_it():
    cost = move_cost(MODEL, 2, Layout(1, generation_tensor=2, expert=4), 8, HALVES, UNIT)
    assert cost.collective_s == pytest.approx((4 * REST + ROUTED) / 2 * 2)


# Seconds.


def exchanged(layout: Layout, *, backward: bool, remat: bool = False) -> list[tuple[str, int]]:
    """Return kind and float32 bytes of one layer's collectives of tokens among devices that share experts."""
    position = {device.id: place for place, device in enumerate(jax.devices())}
    sharing = {frozenset(first + layout.tensor * n for n in range(layout.expert)) for first in _firsts(layout)}
    found = []
    for line in compiled(MODEL, layout, (8, 24), backward=backward, remat=remat).as_text().splitlines():
        match = _INSTRUCTION.search(line)
        if match is None or "replica_groups" not in match["rest"] or "while/body" not in match["rest"]:
            continue
        groups = {frozenset(position[device] for device in group) for group in _groups(match["rest"])}
        for rows, width, hidden in re.findall(r"f32\[(?:1,)?(\d+),(\d+),(\d+)\]", match["result"]):
            if groups == sharing and (int(width), int(hidden)) == (24, 32):
                found.append((match["kind"], int(rows) * 24 * 32 * 4))
    return found


def _firsts(layout: Layout) -> list[int]:
    block = layout.expert * layout.tensor
    return [start + shard for start in range(0, 8, block) for shard in range(layout.tensor)]


@pytest.mark.parametrize(
    ("layout", "backward", "remat"),
    [
        pytest.param(Layout(2, expert=4), False, False, marks=pytest.mark.seeds),
        (Layout(2, expert=4), True, True),
        (Layout(1, 2, 1, 2, 1, 1, 2), True, False),
    ],
)
def test_tokens_go_to_their_experts_and_back_as_often_as_xla_says(layout, backward, remat):
    found = exchanged(layout, backward=backward, remat=remat)
    # Accelerators use a reduce-scatter if every device takes only its rows of the sum.
    kinds = [kind for kind, _ in found]
    assert kinds.count("all-gather") == 1 + backward * (1 + remat)
    assert kinds.count("all-reduce") == 1 + backward
    # Eight rows of 24 tokens are a microbatch.
    work = replace(WORK, prompts=8, responses=8, prompt_tokens=12, response_tokens=12)
    role, cost = trained(MODEL, rows_per_microbatch=8, remat=remat), update_cost if backward else forward_cost
    software = replace(HALVES, compute_bytes=4, gradient_bytes=4)
    seconds = cost(role, layout, work, software, UNIT).collective_s
    alone = cost(role, replace(layout, fsdp=layout.fsdp * layout.expert, expert=1), work, software, UNIT).collective_s
    # Experts are gathered along `fsdp` alone instead.
    moves = (1 + 2 * backward) * 4 * ROUTED / layout.tensor
    shards, rest = layout.fsdp * layout.expert, layout.fsdp
    saved = moves * ((shards - 1) / shards - (rest - 1) / rest / layout.expert)
    received = sum(size for _, size in found) * (layout.expert - 1) / layout.expert
    assert seconds - alone == pytest.approx(2 * received - saved)


def test_an_exchange_takes_the_steps_of_its_ring():
    work = replace(WORK, responses=64)
    role = trained(MODEL, rows_per_microbatch=64, remat=True)
    # In each layer a gather and a scatter forward, and two gathers and a scatter backward. Weights without experts are
    # gathered twice and their gradients scattered once; embeddings are exchanged forward and backward.
    assert update_cost(role, Layout(2, expert=4), work, HALVES, STEPS).collective_s == 2 * 5 * 3 + 3 * 3 + 2 * 3 + 2
    assert forward_cost(role, Layout(2, expert=4), work, HALVES, STEPS).collective_s == 2 * 2 * 3 + 3 + 3


def test_decoding_reads_the_experts_that_are_there_for_the_tokens_of_all_who_share_them():
    model = replace(MODEL, experts=Experts(4, 1, 16))
    work = replace(WORK, prompts=0, response_tokens=20.0)
    fixed = 2 * (4 * 32 * 32 + 32 * 4) + 32 * 64

    def generated(layout, hardware):
        return generation_cost(model, layout, Decoding(1, 8, 8), work, HALVES, hardware)

    reads = replace(UNIT, matmul_flops_per_s=1e30, link_bytes_per_s=1e30)
    whole, divided = (generated(layout, reads).memory_s for layout in (Layout(8), Layout(2, expert=4)))
    # Each of four experts is chosen by a quarter of the 8 tokens of one device, or of the 32 tokens of four devices.
    read = [fixed + ROUTED * (1 - 0.75**8), fixed + ROUTED / 4 * (1 - 0.75**32)]
    assert whole - divided == pytest.approx(20 * 2 * (read[0] - read[1]))
    # Each of 20 decode steps and the prefill gathers and scatters tokens in 2 layers, in 3 ring steps each.
    assert generated(Layout(2, expert=4), STEPS).collective_s == 21 * 2 * 2 * 3
    sent = generated(Layout(2, expert=4), UNIT).collective_s
    assert sent == pytest.approx(20 * 8 * 2 * 2 * 3 * 32 * 2)
