"""Seconds of generation and of weight transfers, compared with bytes counted by hand and with real transfers."""

import itertools
import random
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from unit_machines import (
    ALL_SPLIT,
    DENSE,
    FREE,
    GROUPED,
    HALVES,
    ROUTED,
    STEPS,
    UNIT,
    WORK,
    weights_of,
)

from jaxrlhf.config import Layout
from jaxrlhf.models.config import Experts, ModelConfig
from jaxrlhf.models.parameters import param_dims, param_shapes
from jaxrlhf.planner.cost.cost import (
    Decoding,
    decoding,
    experts_read,
    generation_cost,
    switch_bytes,
    switch_cost,
)
from jaxrlhf.planner.hardware import Hardware
from jaxrlhf.planner.plan import Cost
from jaxrlhf.planner.workload import Workload
from jaxrlhf.resharding.hybrid import HybridEngine
from jaxrlhf.sharding.mesh import factored_mesh, generation_mesh

READS = replace(UNIT, matmul_flops_per_s=FREE, link_bytes_per_s=FREE)
"""Hardware on which only memory reads take time."""
NEW_TOKENS = 20  # the longest, 30, less the prompt of 10; the mean response has 6
ALONE = Layout(1)
ONE = Decoding(1, 1, 1)


def read_weights(model: ModelConfig) -> int:
    """Return the number of weights that every token reads: all except the embedding and the norms."""
    return weights_of(model) - 64 * 32 - (2 * model.num_layers + 1) * 32


def generated(
    layout: Layout = ALONE,
    how: Decoding = ONE,
    *,
    model: ModelConfig = DENSE,
    work: Workload = WORK,
    hardware: Hardware = READS,
) -> Cost:
    """Return the cost of generating as many responses as fill all waves."""
    work = replace(work, responses=how.waves * how.at_once * how.replicas)
    return generation_cost(model, layout, how, work, HALVES, hardware)


def cache_reads(model: ModelConfig, responses: int, *, prompt: int = 10, tokens: int = 6) -> float:
    """Return the bytes of keys and values read by all tokens; the current token counts half."""
    lengths = [prompt + new + 0.5 for new in range(tokens)]
    return responses * sum(lengths) * model.num_layers * 2 * model.num_kv_heads * model.head_dim * 2


@pytest.mark.parametrize(("model", "at_once"), [(DENSE, 1), (GROUPED, 64)], ids=["dense", "grouped"])
def test_a_token_reads_all_weights_once_and_the_cache_of_every_response(model: ModelConfig, at_once: int) -> None:
    cost = generated(how=Decoding(1, at_once, 1), model=model)
    # Responses are 6 tokens long on average; until the longest ends, weights are read for it alone.
    assert cost.memory_s == pytest.approx(NEW_TOKENS * read_weights(model) * 2 + cache_reads(model, at_once))


@pytest.mark.parametrize(
    ("waves", "at_once", "by_products"), [(1, 333, False), (1, 334, True), (2, 216, False), (2, 217, True)]
)
def test_many_responses_are_bound_by_products(waves: int, at_once: int, by_products: bool) -> None:
    hardware = replace(READS, matmul_flops_per_s=200.0, matmul_efficiency=0.5)
    cost = generated(how=Decoding(waves, at_once, 1), work=replace(WORK, prompts=0), hardware=hardware)
    # Each of 20 or 26 steps reads 2 bytes of a weight at 1 byte/s; each of 6 tokens of a response takes 2 operations.
    reading = {1: 20, 2: 26}[waves] * read_weights(DENSE) * 2
    multiplying = waves * at_once * 6 * read_weights(DENSE) * 2 / 100
    linear = multiplying if by_products else reading
    assert linear == max(reading, multiplying)
    assert cost.seconds - cache_reads(DENSE, waves * at_once) == pytest.approx(linear)
    assert cost.compute_s == pytest.approx(multiplying)


@pytest.mark.parametrize(("accepted", "gained"), [(1.0, 4.0), (0.5, 1.875)])
def test_drafts_read_weights_and_cache_once_for_the_tokens_that_are_gained(accepted: float, gained: float) -> None:
    plain, drafted = (generated(work=replace(WORK, accepted=share)) for share in (0.0, accepted))
    assert drafted.memory_s == pytest.approx(plain.memory_s / gained)
    hardware = replace(READS, matmul_flops_per_s=1e6)
    plain, drafted = (generated(work=replace(WORK, accepted=share), hardware=hardware) for share in (0.0, accepted))
    prefill = generated(work=replace(WORK, response_tokens=1e-9), hardware=hardware).compute_s
    # A pass multiplies four tokens, whatever it gains.
    assert drafted.compute_s - prefill == pytest.approx((plain.compute_s - prefill) * 4 / gained)


def test_drafts_are_left_out_where_they_lose_and_of_many_responses() -> None:
    bound = replace(READS, memory_bytes_per_s=FREE, matmul_flops_per_s=1.0)
    for how, hardware in ((ONE, bound), (Decoding(1, 65, 1), READS)):
        costs = [
            generated(how=how, work=replace(WORK, accepted=share, longest_tokens=16), hardware=hardware).seconds
            for share in (0.0, 0.9)
        ]
        assert costs[0] == costs[1]


@pytest.mark.parametrize(("devices", "layout", "fit", "slots", "expected"), [
    (4, Layout(4), 16, None, Decoding(1, 16, 4)),
    (4, Layout(4), 15, None, Decoding(2, 8, 4)),
    (4, Layout(4), 100, 32, Decoding(2, 8, 4)),
    (4, Layout(4), 4, 32, Decoding(4, 4, 4)),
    (8, Layout(1, 1, 2, 4, 1, 2), 100, None, Decoding(1, 16, 4)),
    (3, Layout(3), 100, None, Decoding(1, 22, 3)),
])  # fmt: skip
def test_responses_take_as_many_waves_as_the_room_asks_for(
    devices: int, layout: Layout, fit: int, slots: int | None, expected: Decoding
) -> None:
    how = decoding(layout, devices, fit, replace(WORK, slots=slots))
    assert how == expected
    assert how.waves * how.at_once * how.replicas >= 64


def test_room_for_more_responses_never_takes_longer() -> None:
    rng, gained = random.Random(0), 0
    for _ in range(300):
        layout = Layout(generation_stage=rng.choice([1, 2]), generation_tensor=rng.choice([1, 2, 4]))
        response = rng.choice([0.5, 3.5, 20.0])
        sizes = rng.choice([1, 4]), rng.randint(1, 40), rng.uniform(1, 20), response, 20 + rng.choice([20, 30, 90])
        work = Workload(*sizes, slots=rng.choice([None, None, 3, 9]))
        rates = {name: 10 ** rng.uniform(-1, 3) for name in ("matmul_flops_per_s", "memory_bytes_per_s")}
        delays = {name: 10 ** rng.uniform(0, 5) for name in ("link_latency_s", "layer_overhead_s")}
        hardware, model = replace(UNIT, **rates, **delays), rng.choice([DENSE, GROUPED])
        ways = [decoding(layout, 8, fit, work) for fit in range(1, work.responses + 1)]
        seconds = [generation_cost(model, layout, how, work, HALVES, hardware).seconds for how in ways]
        assert all(more <= less * (1 + 1e-12) for less, more in itertools.pairwise(seconds)), (layout, work)
        gained += seconds[-1] < seconds[0] * 0.99
    assert gained > 100


def test_stages_of_generation_save_no_time() -> None:
    how, hardware = Decoding(1, 8, 2), replace(UNIT, link_bytes_per_s=FREE)
    whole = generated(Layout(4, 1, 1, 1), how, hardware=hardware)
    for stage in (2, 4):
        staged = generated(Layout(1, 1, 4, 1, stage, 1), how, hardware=hardware)
        assert staged.seconds == pytest.approx(whole.seconds)
        busy = staged.compute_s + staged.memory_s
        assert busy == pytest.approx(whole.seconds / stage)
        assert staged.idle_s == pytest.approx(whole.seconds * (stage - 1) / stage)
    # Each token is sent between stages three times.
    steps = generated(Layout(1, 1, 4, 1, 4, 1), how, hardware=STEPS).collective_s
    assert steps == pytest.approx(3 * NEW_TOKENS)
    sent = generated(Layout(1, 1, 4, 1, 4, 1), how, hardware=UNIT).collective_s
    assert sent == pytest.approx(3 * 8 * 6 * 32 * 2)


def test_experts_are_read_if_any_token_draws_them() -> None:
    for (count, per_token), tokens in itertools.product([(4, 1), (4, 2), (3, 2), (4, 4)], [1, 2, 3]):
        draws = list(itertools.combinations(range(count), per_token))
        hit = [len(set().union(*sampled)) for sampled in itertools.product(draws, repeat=tokens)]
        model = replace(ROUTED, experts=Experts(count, per_token, 16))
        assert experts_read(model, tokens) == pytest.approx(sum(hit) / len(hit))
    assert experts_read(DENSE, 1) is None


M = weights_of(ALL_SPLIT) * 2


@pytest.mark.parametrize(("p", "t"), [(1, 1), (1, 4), (4, 1), (2, 4), (8, 8)])
def test_a_switch_moves_what_the_table_says(p: int, t: int) -> None:
    """HybridFlow, table 2: (t p - t_g p_g) / (t_g p_g t p) M."""
    grid = [(pg, tg) for pg in (1, 2, 4, 8) for tg in (1, 2, 4, 8) if p % pg == 0 and t % tg == 0]
    for pg, tg in grid:
        expected = (t * p - tg * pg) / (tg * pg * t * p) * M
        assert switch_bytes(ALL_SPLIT, Layout(1, 1, p, t, pg, tg), itemsize=2) == pytest.approx(expected)
        # With 4 shards a device holds a quarter as much, and receives the rest.
        missing = M / (tg * pg) - M / (t * p) / 4
        assert switch_bytes(ALL_SPLIT, Layout(1, 4, p, t, pg, tg), itemsize=2) == pytest.approx(missing)


REAL = [
    Layout(2, 1, 1, 4, 1, 2), Layout(1, 1, 1, 8, 1, 1), Layout(1, 1, 1, 8, 1, 4), Layout(1, 8), Layout(2, 4),
    Layout(1, 1, 2, 4, 1, 2), Layout(1, 1, 4, 2, 2, 1), Layout(1, 1, 8, 1, 2, 1), Layout(1, 2, 2, 2, 1, 1),
    Layout(1, 2, 1, 4, 1, 2), Layout(8), Layout(1, 1, 2, 4, 2, 4),
]  # fmt: skip


def really_moved(layout: Layout) -> int:
    """Return the most bytes in bfloat16 that a device has to receive."""
    meshes = factored_mesh(layout, jax.devices()), generation_mesh(layout, jax.devices())
    shapes = param_shapes(ALL_SPLIT, "lm", jnp.bfloat16)
    return HybridEngine.by_rules(*meshes, param_dims(ALL_SPLIT, "lm"), shapes, dtype=jnp.bfloat16).bytes_per_device


@pytest.mark.parametrize("layout", REAL)
def test_the_hybrid_engine_moves_what_is_predicted(layout: Layout) -> None:
    # Norms are not split by tensor and fsdp, so a device may hold all 2 x 8 + 1 of them.
    norms = (2 * 8 + 1) * 32 * 2
    predicted = switch_bytes(ALL_SPLIT, layout, itemsize=2)
    assert abs(really_moved(layout) - predicted) <= norms < M / 40
    assert (predicted == 0) == (layout in (Layout(8), Layout(1, 1, 2, 4, 2, 4)))


@pytest.mark.parametrize("generation", [(1, 1), (2, 2), (1, 8)])
def test_whole_weights_on_each_device_switch_for_nothing_to_any_split(generation: tuple[int, int]) -> None:
    layout = Layout(8, 1, 1, 1, *generation)
    assert switch_bytes(ALL_SPLIT, layout, itemsize=2) == 0
    assert switch_cost(ALL_SPLIT, layout, HALVES, A100S) == Cost()
    assert really_moved(layout) == 0


@pytest.mark.parametrize("layout", [Layout(1, 4, 1, 2, 1, 4), Layout(1, 1, 1, 8, 2, 2), Layout(4, 1, 1, 2, 1, 8)])
def test_where_training_does_not_refine_a_switch_moves_no_more_than_a_generation_shard(layout: Layout) -> None:
    predicted = switch_bytes(ALL_SPLIT, layout, itemsize=2)
    assert predicted == pytest.approx(M / (layout.generation_stage * layout.generation_tensor))
    assert predicted / 2 < really_moved(layout) <= predicted + (2 * 8 + 1) * 32 * 2


A100S = replace(
    UNIT, machines=16, devices_per_machine=8, memory_bytes=80e9, matmul_flops_per_s=312e12, memory_bytes_per_s=2039e9,
    link_bytes_per_s=300e9, network_bytes_per_s=200e9 / 8 / 8, host_bytes_per_s=25e9,
    network_latency_s=1e-3, dispatch_overhead_s=0.5, link_efficiency=0.8,
)  # fmt: skip
"""Hardware of the paper: 600 GB/s in both directions, and 200 Gb/s for the eight devices of a machine."""


ONE_MACHINE = replace(UNIT, devices_per_machine=8, network_bytes_per_s=1e-9, network_latency_s=1e9)


@pytest.mark.parametrize(("layout", "missing"), [
    (Layout(1, 2, 1, 4, 1, 2), 1 / 2 - 1 / 8), (Layout(1, 2, 1, 4, 1, 1), 1 - 1 / 8),
    (Layout(1, 1, 4, 2, 1, 1), 1 - 1 / 8), (Layout(1, 8), 1 - 1 / 8), (Layout(2, 1, 2, 2, 1, 1), 1 - 1 / 4),
    # If training does not refine generation, a device is assumed to hold no part of its shard.
    (Layout(1, 1, 8, 1, 1, 2), 1 / 2), (Layout(2, 1, 1, 4, 2, 2), 1 / 4), (Layout(4, 1, 1, 2, 1, 8), 1 / 8),
    (Layout(1, 4, 1, 2, 1, 8), 1 / 8),
])  # fmt: skip
def test_a_switch_inside_one_machine_never_takes_the_network(layout: Layout, missing: float) -> None:
    assert switch_cost(ALL_SPLIT, layout, HALVES, ONE_MACHINE).seconds == pytest.approx(missing * M)
    assert switch_cost(ALL_SPLIT, layout, HALVES, replace(ONE_MACHINE, machines=2)).seconds < M


def sources(layout: Layout, device: int) -> set[int]:
    """Return the devices of the same copy that hold parts of a device's generation shard."""
    place = np.arange(16).reshape(layout.data, layout.fsdp, layout.stage, layout.tensor)
    data, _, stage, tensor = (int(at[0]) for at in np.nonzero(place == device))
    stages, tensors = layout.stage // layout.generation_stage, layout.tensor // layout.generation_tensor
    first_stage, first_tensor = stage // stages * stages, tensor // tensors * tensors
    near = place[data, :, first_stage : first_stage + stages, first_tensor : first_tensor + tensors]
    return set(near.reshape(-1).tolist())


def test_a_switch_takes_the_network_where_parts_of_a_shard_lie_in_two_machines() -> None:
    hardware = replace(UNIT, machines=2, devices_per_machine=8, link_bytes_per_s=FREE)
    powers, seen = (1, 2, 4, 8, 16), []
    for data, fsdp, stage, tensor in itertools.product(powers, repeat=4):
        if data * fsdp * stage * tensor != 16:
            continue
        for pg, tg in itertools.product(powers, repeat=2):
            layout = Layout(data, fsdp, stage, tensor, pg, tg)
            if stage % pg or tensor % tg:
                continue
            far = any(len({near // 8 for near in sources(layout, device)}) > 1 for device in range(16))
            assert (switch_cost(ALL_SPLIT, layout, HALVES, hardware).seconds > 1) == far, layout
            seen.append(far)
    assert 20 < sum(seen) < len(seen) - 20
