"""Seconds of training and scoring, compared with matrix products, ring steps and bytes counted by hand."""

import dataclasses
import random
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from compiled import to_read
from unit_machines import (
    ALL_SPLIT,
    DENSE,
    FREE,
    GROUPED,
    HALVES,
    ROUTED,
    STEPS,
    TOKENS,
    UNIT,
    WORK,
    naive_layer_flops,
    parts,
    trained,
    weights_of,
)

from jaxrlhf import models
from jaxrlhf.config import Layout
from jaxrlhf.models.config import Experts, ModelConfig
from jaxrlhf.planner.cost.cost import decoding, forward_cost, generation_cost, head_flops, layer_flops, update_cost
from jaxrlhf.planner.cost.memory import weights_trained
from jaxrlhf.planner.workload import Role, Software

CLUSTER = replace(UNIT, machines=2, devices_per_machine=8)
LM_HEAD = 2 * 64 * 6 * 32 * 64  # for tokens of responses
TABLE = 64 * 32
ONE_PIPELINE = replace(HALVES, pipeline_parts_per_stage=None)
ONE_WITH_HEAD = replace(ONE_PIPELINE, head_on_last_stage=True)
SPLITS = [
    Layout(16), Layout(1, 16), Layout(4, 4), Layout(4, 1, 4), Layout(8, 1, 1, 2), Layout(2, 2, 2, 2), Layout(1, 2, 4, 2)
]  # fmt: skip


@pytest.mark.slow
def test_the_forward_pass_multiplies_as_often_as_xla_says() -> None:
    # One layer and short rows, so that no loop over layers or tiles exists: XLA counts the body of a loop once.
    config = ModelConfig("qwen2", 512, 256, 768, 1, 8, 2, 32, qkv_bias=True)
    rows, width = 2, 960
    ints = jax.ShapeDtypeStruct((rows, width), jnp.int32)

    def forward(params, token, position, segment):
        return models.logits(params, config, models.hidden_states(params, config, token, position, segment).hidden_RWD)

    compiled = to_read(jax.jit(forward).lower(models.param_shapes(config, "lm"), ints, ints, ints))
    counted = compiled.cost_analysis()["flops"]
    tokens = rows * width
    head = head_flops(config, "lm", tokens=tokens)
    # Masked scores are not computed, except in blocks of queries that the mask divides.
    assert layer_flops(config, tokens=tokens, context=width / 2) + head == pytest.approx(counted, rel=0.05)
    assert layer_flops(config, tokens=tokens, context=width * 9 / 16) + head == pytest.approx(counted, rel=0.02)


@pytest.mark.parametrize("layout", SPLITS)
@pytest.mark.parametrize("remat", [False, True])
def test_an_update_is_six_operations_a_weight_and_token_however_it_is_split(layout: Layout, remat: bool) -> None:
    layers = 4 * naive_layer_flops(GROUPED, tokens=TOKENS, context=8)
    scores = 4 * TOKENS * 4 * 4 * 8 * 8  # a token attends to half of its row
    weights = 4 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48)
    assert layers == 2 * weights * TOKENS + scores
    expected = (8 if remat else 6) * weights * TOKENS + (4 if remat else 3) * scores
    for software, read in ((Software(), 1), (ONE_WITH_HEAD, 1), (replace(Software(), reads_responses=False), 16 / 6)):
        cost = update_cost(trained(GROUPED, remat=remat), layout, WORK, software, UNIT)
        assert cost.compute_s == pytest.approx((expected + 4 * read * LM_HEAD) / 16)
        assert cost.host_s == cost.overhead_s == 0
    scored = forward_cost(trained(GROUPED, remat=remat), layout, WORK, HALVES, UNIT)
    assert scored.compute_s == pytest.approx((layers + LM_HEAD) / 16)
    assert scored.memory_s == scored.host_s == scored.overhead_s == 0


def test_chunks_of_logits_are_computed_as_often_as_xla_says() -> None:
    config = replace(DENSE, hidden_size=512, vocab_size=2048, num_layers=1)
    rows, width, chunk_tokens = 4, 128, 64
    ints = jax.ShapeDtypeStruct((rows, width), jnp.int32)
    hidden = jax.ShapeDtypeStruct((rows, width, 512), jnp.float32)

    def loss(params, hidden, token):
        return jnp.sum(models.token_logp(params, config, hidden, token, chunk_tokens=chunk_tokens).logp ** 2)

    shapes = models.param_shapes(config, "lm")
    compiled = to_read(jax.jit(jax.value_and_grad(loss, argnums=(0, 1))).lower(shapes, hidden, ints))
    counted = compiled.cost_analysis()["flops"]
    # XLA counts the body of a loop once: one chunk forward and one back.
    assert counted == pytest.approx(4 * 2 * chunk_tokens * 512 * 2048, rel=0.02)
    layers = 3 * naive_layer_flops(config, tokens=TOKENS, context=8)
    update_s = update_cost(trained(config), Layout(1), WORK, HALVES, UNIT).compute_s
    assert (update_s - layers) / (64 * 6) * chunk_tokens == pytest.approx(counted, rel=0.02)


@pytest.mark.parametrize(("layout", "sums"), [(Layout(2, 2), 1), (Layout(2, 1, 2, 2), 1), (Layout(2, 2, 1, 2), 4)])
def test_weights_split_both_ways_have_their_gradients_summed_in_each_microbatch(layout: Layout, sums: int) -> None:
    """Two replicas take as long as one with half of the responses, and the sums of their gradients."""
    alone, half = replace(layout, data=1), replace(WORK, responses=32)
    two = update_cost(trained(DENSE), layout, WORK, HALVES, UNIT).collective_s
    one = update_cost(trained(DENSE), alone, half, HALVES, UNIT).collective_s
    assert two - one == pytest.approx(sums * weights_trained(DENSE, "lm", None, layout) * 2)


def test_sharded_weights_move_three_times_where_replicas_move_twice() -> None:
    """ZeRO (arXiv:1910.02054), section 7: 3 psi for stage 3 and 2 psi for plain data parallelism.

    Of a table that is looked up in tokens travel, there and back.
    """
    role = trained(DENSE, rows_per_microbatch=64)
    psi = weights_of(DENSE) * 2 * 7 / 8
    assert update_cost(role, Layout(8), WORK, HALVES, UNIT).collective_s == pytest.approx(2 * psi)
    psi -= TABLE * 2 * 7 / 8
    looked_up = TOKENS / 8 * 32 * 2 * 7 / 8
    assert update_cost(role, Layout(1, 8), WORK, HALVES, UNIT).collective_s == pytest.approx(3 * psi + 2 * looked_up)
    assert forward_cost(role, Layout(1, 8), WORK, HALVES, UNIT).collective_s == pytest.approx(psi + looked_up)
    assert forward_cost(role, Layout(8), WORK, HALVES, UNIT).collective_s == 0


@pytest.mark.parametrize(("remat", "reduces"), [(False, 4), (True, 6)])
def test_tensor_shards_reduce_twice_a_layer_in_each_pass(remat: bool, reduces: int) -> None:
    """Megatron-LM (arXiv:1909.08053), section 3: two all-reduces forward and two backward in each layer.

    And one of the embeddings.
    """
    role = trained(DENSE, remat=remat)
    # 64 rows, 4 at a time; an all-reduce of 4 takes twice 3 steps.
    assert update_cost(role, Layout(1, 1, 1, 4), WORK, HALVES, STEPS).collective_s == pytest.approx(
        16 * (4 * reduces + 1) * 6
    )
    moved = (4 * reduces + 1) * 2 * 3 / 4 * TOKENS * 32 * 2
    assert update_cost(role, Layout(1, 1, 1, 4), WORK, HALVES, UNIT).collective_s == pytest.approx(moved)
    assert forward_cost(role, Layout(1, 1, 1, 4), WORK, HALVES, UNIT).collective_s == pytest.approx(
        (4 * 2 + 1) * 2 * 3 / 4 * TOKENS * 32 * 2
    )


def test_updates_repeat_the_optimizer_and_epochs_the_rest() -> None:
    role = trained(DENSE)
    one = update_cost(role, Layout(2, 2), WORK, HALVES, UNIT)
    four = update_cost(role, Layout(2, 2), replace(WORK, updates=4), HALVES, UNIT)
    # The optimizer reads a gradient, and reads and writes a weight and moments; a microbatch's gradient is added.
    held = weights_of(DENSE) / 2
    assert (four.compute_s, four.memory_s - one.memory_s) == pytest.approx((one.compute_s, 3 * 14 * held))
    again = update_cost(role, Layout(2, 2), replace(WORK, epochs=3), HALVES, UNIT)
    assert (again.compute_s, again.memory_s - one.memory_s) == pytest.approx((3 * one.compute_s, 2 * 4 * 6 * held))
    assert forward_cost(role, Layout(2), replace(WORK, epochs=3, updates=4), HALVES, UNIT) == forward_cost(
        role, Layout(2), WORK, HALVES, UNIT
    )


def test_a_batch_that_does_not_divide_costs_as_its_largest_share() -> None:
    role = trained(DENSE)
    for cost_of in (update_cost, forward_cost):
        uneven, even, less = (
            cost_of(role, Layout(4, 4), replace(WORK, responses=responses), HALVES, UNIT).compute_s
            for responses in (65, 80, 64)
        )
        assert uneven == even == pytest.approx(less * 5 / 4)


@pytest.mark.parametrize(("layout", "moved"), [
    # With two copies of eight devices, each device shares its machine's connection with seven others.
    (Layout(2, 1, 1, 8), 2 * 1 / 2 / 8), (Layout(1, 2, 1, 8), 3 * 1 / 2 / 8), (Layout(2, 8), 2 * 1 / 2 / 8),
    # With four copies of four devices, two in each machine, it shares with three others.
    (Layout(4, 1, 1, 4), 2 * 3 / 4 / 4 / 2), (Layout(1, 4, 1, 4), 3 * 3 / 4 / 4 / 2),
    # One ring over all sixteen devices has the whole connection.
    (Layout(16), 2 * 15 / 16 / 8), (Layout(1, 16), 3 * 15 / 16 / 8),
])  # fmt: skip
def test_copies_on_two_machines_meet_over_the_network(layout: Layout, moved: float) -> None:
    """Count only bytes between machines; `moved` is in whole models of two bytes a weight.

    Models split by width do not gather their table: each device with a part of the heads exchanges all its tokens.
    """
    hardware = replace(CLUSTER, link_bytes_per_s=FREE)
    cost = update_cost(trained(ALL_SPLIT, rows_per_microbatch=64), layout, WORK, HALVES, hardware)
    expected = moved * weights_of(ALL_SPLIT) * 2
    if layout.data == 1:
        expected += moved / 3 * 2 * (2 * TOKENS / layout.fsdp * 32 * layout.tensor - 3 * TABLE)
    assert cost.collective_s == pytest.approx(expected)


RATES = ("matmul_flops_per_s", "memory_bytes_per_s", "link_bytes_per_s", "network_bytes_per_s")


def random_case(rng: random.Random):
    """Sample a model, a layout of sixteen devices, software and hardware."""
    sizes = dict.fromkeys(("data", "fsdp", "stage", "tensor"), 1)
    for _ in range(4):
        sizes[rng.choice(list(sizes))] *= 2
    generation = {"generation_stage": rng.choice([1, 2]), "generation_tensor": rng.choice([1, 2, 4, 8])}
    model = rng.choice([DENSE, GROUPED, ROUTED])
    role = trained(model, remat=rng.random() < 0.5, rows_per_microbatch=rng.choice([1, 3, 64]))
    software = Software(
        pipeline_parts_per_stage=rng.choice([None, 4]),
        scatters_between_stages=rng.random() < 0.5,
        head_on_last_stage=rng.random() < 0.5,
        decode_tokens_per_dispatch=rng.choice([None, 1, 16]),
        reads_responses=rng.random() < 0.5,
    )
    hardware = replace(CLUSTER, **{name: 10 ** rng.uniform(-3, 3) for name in RATES}, layer_overhead_s=1.0)
    return role, Layout(**sizes, **generation), software, hardware


def everything(role: Role, layout: Layout, software: Software, hardware) -> list:
    how = decoding(layout, 16, 5, WORK)
    return [
        update_cost(role, layout, WORK, software, hardware),
        forward_cost(role, layout, WORK, software, hardware),
        generation_cost(role.model, layout, how, WORK, software, hardware),
    ]


def test_faster_machines_are_never_slower_and_no_part_is_negative() -> None:
    rng = random.Random(0)
    gained = dict.fromkeys(RATES, 0)
    for _ in range(300):
        role, layout, software, hardware = random_case(rng)
        costs = everything(role, layout, software, hardware)
        assert all(0 <= part < FREE for cost in costs for part in parts(cost))
        for name in RATES:
            faster = replace(hardware, **{name: getattr(hardware, name) * rng.uniform(1, 10)})
            for slow, fast in zip(costs, everything(role, layout, software, faster), strict=True):
                assert fast.seconds <= slow.seconds * (1 + 1e-12), (name, layout, software)
                gained[name] += fast.seconds < slow.seconds
    assert min(gained.values()) > 50


def test_experts_that_are_not_met_never_cost_more_than_a_dense_model_of_all() -> None:
    rng = random.Random(1)
    for _ in range(100):
        role, layout, software, hardware = random_case(rng)
        sparse = replace(GROUPED, experts=Experts(8, rng.choice([1, 2, 4]), 16))
        dense = replace(GROUPED, experts=Experts(8, 8, 16))
        pairs = (everything(dataclasses.replace(role, model=model), layout, software, hardware)
                 for model in (sparse, dense))  # fmt: skip
        for few, every in zip(*pairs, strict=True):
            assert few.seconds <= every.seconds * (1 + 1e-12)
        assert (
            forward_cost(replace(role, model=sparse), layout, WORK, software, hardware).compute_s
            < forward_cost(replace(role, model=dense), layout, WORK, software, hardware).compute_s
        )
