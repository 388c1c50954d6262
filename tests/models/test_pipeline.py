"""Layers divided over stages: the same numbers, each stage with its own layers only."""

import functools
import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled import to_read
from jax.sharding import NamedSharding, PartitionSpec
from tiny_models import DECODER, close, random_params

from jaxrlhf import models
from jaxrlhf.models.attention.attention import ROWS as ROWS_KERNELS
from jaxrlhf.sharding.mesh import BATCH_AXES, STAGE_AXES, WEIGHT_AXES, mesh_of
from jaxrlhf.sharding.rules import TRAIN, shardings

CONFIG = replace(DECODER, num_layers=8, qkv_bias=True, qk_norm=True)
ROWS, WIDTH = 12, 17
AGAIN = models.Execution(remat=True)
DIMS = models.param_dims(CONFIG, "lm")


@pytest.fixture(scope="module")
def params():
    return random_params(CONFIG)


@pytest.fixture(scope="module")
def rows():
    """Every row has its own tokens, two sequences of its own lengths, and padding."""
    rng = np.random.default_rng(1)
    token_RW = rng.integers(0, 96, (ROWS, WIDTH), dtype=np.int32)
    cut_R1, end_R1 = rng.integers(3, 8, (ROWS, 1)), rng.integers(10, WIDTH + 1, (ROWS, 1))
    index_1W = np.arange(WIDTH)[None, :]
    position_RW = np.where(index_1W < cut_R1, index_1W, index_1W - cut_R1).astype(np.int32)
    segment_RW = ((index_1W < cut_R1) + 2 * ((index_1W >= cut_R1) & (index_1W < end_R1))).astype(np.int32)
    return token_RW, position_RW, segment_RW


def of(mesh):
    """Return the layouts of parameters and rows, and the execution, as workers choose them."""
    pipeline = models.pipeline_over(mesh, STAGE_AXES, row_axes=BATCH_AXES, weight_axes=WEIGHT_AXES)
    execution = models.Execution(remat=True, mesh=mesh, row_axes=BATCH_AXES, pipeline=pipeline)
    return shardings(mesh, DIMS, TRAIN), NamedSharding(mesh, PartitionSpec(BATCH_AXES)), execution


def loss(params, rows, *, execution=AGAIN):
    hidden_RWD = models.hidden_states(params, CONFIG, *rows, execution=execution).hidden_RWD
    output = models.token_logp(params, CONFIG, hidden_RWD, rows[0], temperature=0.9, entropy=True)
    logp_RW = jnp.where(rows[2] > 0, output.logp, 0.0)
    return (logp_RW * jnp.sin(jnp.arange(logp_RW.size)).reshape(logp_RW.shape)).sum(), logp_RW


def gradient(**settings):
    return jax.jit(jax.grad(functools.partial(loss, **settings), has_aux=True))


@pytest.fixture(scope="module")
def expected(params, rows):
    return gradient()(params, rows)


@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param({"data": 2, "stage": 2, "tensor": 2}, marks=pytest.mark.seeds),
        pytest.param({"fsdp": 2, "stage": 2, "tensor": 2}, marks=pytest.mark.slow),
        {"data": 2, "stage": 2, "micro_stage": 2},
    ],
    ids=str,
)
def test_stages_do_not_change_logp_or_gradients(params, rows, expected, sizes):
    layout, row_sharding, execution = of(mesh_of(sizes, jax.devices()))
    found = gradient(execution=execution)(jax.device_put(params, layout), jax.device_put(rows, row_sharding))
    close(found, expected, 4e-6)


@pytest.mark.slow
def test_kernels_run_on_the_heads_and_rows_of_a_stage_device(params, rows, expected, monkeypatch):
    seen = []

    def kernel(query_RWNH, *rest):
        seen.append(query_RWNH.shape)
        return ROWS_KERNELS["xla"](query_RWNH, *rest)

    monkeypatch.setitem(ROWS_KERNELS, "splash", kernel)
    sizes = {"data": 2, "stage": 2, "tensor": 2}
    layout, row_sharding, execution = of(mesh_of(sizes, jax.devices()))
    execution = replace(execution, remat=False, rows_kernel="splash", head_axes=("tensor",))
    program = gradient(execution=execution)
    found = program(jax.device_put(params, layout), jax.device_put(rows, row_sharding))
    close(found, expected, 4e-6)
    assert set(seen) == {(1, WIDTH, CONFIG.num_heads // 2, CONFIG.head_dim)}


@pytest.mark.slow
def test_half_precision(params, rows, expected):
    """Half precision differs from float32 no more than on one device; XLA:CPU once aborted here."""
    layout, row_sharding, execution = of(mesh_of({"data": 2, "stage": 2}, jax.devices()[:4]))
    program = gradient(execution=replace(execution, dtype=jnp.bfloat16))
    _, many_RW = program(jax.device_put(params, layout), jax.device_put(rows, row_sharding))
    _, one_RW = jax.jit(functools.partial(loss, execution=models.Execution(jnp.bfloat16, remat=True)))(params, rows)
    many, one = (np.abs(np.asarray(logp_RW) - expected[1]).max() for logp_RW in (many_RW, one_RW))
    assert 0 < many < 1.5 * one


def computations(program):
    """Optimised HLO by computation; the entry's name is `ENTRY`."""
    parts = re.split(r"\n(?=%|ENTRY )", program.as_text())
    return {"ENTRY" if part.startswith("ENTRY") else part.split()[0]: part for part in parts[1:]}


@pytest.fixture(scope="module")
def program(params, rows):
    """Gradient of the hidden states alone, so that all loops are the pipeline's."""
    layout, row_sharding, execution = of(mesh_of({"data": 2, "stage": 4}, jax.devices()))

    def total(layers, others, rows):
        whole = others | {"layers": layers}
        hidden_RWD = models.hidden_states(whole, CONFIG, *rows, execution=execution).hidden_RWD
        return jnp.square(hidden_RWD).sum()

    layers, others = params["layers"], {name: leaf for name, leaf in params.items() if name != "layers"}
    whole = {name: NamedSharding(row_sharding.mesh, PartitionSpec()) for name in others}
    arguments = jax.device_put((layers, others, rows), (layout["layers"], whole, row_sharding))
    return to_read(jax.jit(jax.grad(total)).lower(*arguments))


def test_each_stage_runs_its_own_layers_for_every_microbatch(program):
    """12 rows on 2 devices are 6 microbatches of 1: 9 ticks of 2 layers, on 4 stages."""
    loops = set(re.findall(r'known_trip_count":\{"n":"(\d+)"', program.as_text()))
    assert loops == {"9", "2"}
    inner = CONFIG.intermediate_size
    assert f"f32[1,{WIDTH},{inner}]" in program.as_text()
    for size in (2, 6, 12):
        assert f"f32[{size},{WIDTH},{inner}]" not in program.as_text()
        assert f"f32[{size},1,{WIDTH},{inner}]" not in program.as_text()


def test_only_hidden_states_travel_between_stages(program):
    """In the loops, one row to the next stage; outside, gradients summed over data and rows to all stages."""
    parts = computations(program)
    entry = parts.pop("ENTRY")
    loops = "\n".join(parts.values())
    assert not re.search(r" (all-gather|all-reduce|reduce-scatter|all-to-all)(-start)?\(", loops)
    moved = re.findall(r"= (\S+) collective-permute\(.*source_target_pairs=\{(.*?\})\}", loops)
    assert {shape.split("{")[0] for shape, _ in moved} == {f"f32[1,{WIDTH},{CONFIG.hidden_size}]"}
    forth = "{0,1},{1,2},{2,3},{4,5},{5,6},{6,7}"
    back = "{1,0},{2,1},{3,2},{5,4},{6,5},{7,6}"
    assert {pairs for _, pairs in moved} == {forth, back}
    assert not re.search(r" (all-gather|collective-permute|all-to-all)(-start)?\(", entry)
    assert re.search(r" all-reduce(-start)?\(", entry)


def test_microbatches_keep_stages_busy_and_divide_the_rows():
    mesh = mesh_of({"data": 4, "stage": 2}, jax.devices())
    pipeline = models.pipeline_over(mesh, STAGE_AXES, row_axes=BATCH_AXES)
    assert [pipeline.microbatches(4 * rows) for rows in (1, 3, 8, 12, 16, 64)] == [1, 3, 8, 6, 8, 8]
    with pytest.raises(ValueError, match="10 rows do not split 4 ways over mesh axes data; use a multiple of 4"):
        pipeline.microbatches(10)


def test_one_stage_is_no_pipeline():
    mesh = mesh_of({"data": 4, "tensor": 2}, jax.devices())
    assert models.pipeline_over(mesh, STAGE_AXES, row_axes=BATCH_AXES) is None


def test_pipelines_that_cannot_be_are_refused():
    mesh = mesh_of({"stage": 8}, jax.devices())
    with pytest.raises(ValueError, match="the mesh has no axis stages; its axes are data, fsdp"):
        models.pipeline_over(mesh, ("stages",), row_axes=BATCH_AXES)
    with pytest.raises(ValueError, match="must end with weight_axes"):
        models.pipeline_over(mesh, STAGE_AXES, row_axes=BATCH_AXES, weight_axes=("data",))
