"""The switch between layouts: what it moves, against the paper's formula and the compiled program."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxrlhf.architecture import ModelConfig
from jaxrlhf.config import Layout
from jaxrlhf.models.parameters import init_params, param_dims, param_shapes
from jaxrlhf.parallel import (
    GENERATE,
    TRAIN,
    HybridEngine,
    check_divisible,
    factored_mesh,
    missing_bytes,
    refines,
    shard_bytes,
    shardings,
)

SHAPES = {"w": jax.ShapeDtypeStruct((16, 64), jnp.float32)}
DIMS = {"w": (None, "mlp")}
COLLECTIVES = r"\b(all-gather|all-reduce|reduce-scatter|collective-permute|all-to-all)(?:-start)?\("


def mesh_of(*, data: int, tensor: int, generation: int) -> Mesh:
    layout = Layout(data=data, tensor=tensor, generation_tensor=generation)
    return factored_mesh(layout, jax.devices()[: data * tensor])


@pytest.mark.parametrize(("data", "tensor", "generation"), [(2, 4, 2), (1, 8, 2), (1, 8, 1), (2, 4, 1), (4, 2, 2)])
def test_bytes_received_equal_the_papers_formula(data: int, tensor: int, generation: int) -> None:
    engine = HybridEngine(mesh_of(data=data, tensor=tensor, generation=generation), DIMS, SHAPES, dtype=jnp.float32)
    model_bytes = 16 * 64 * 4
    assert engine.bytes_per_device == model_bytes * (tensor - generation) // (generation * tensor)
    assert engine.refines
    assert shard_bytes(SHAPES, engine.generate) == model_bytes // generation  # peak, and no redundancy beside it


def test_the_switch_compiles_to_one_all_gather_in_the_micro_data_parallel_groups() -> None:
    engine = HybridEngine(mesh_of(data=2, tensor=4, generation=2), DIMS, SHAPES, dtype=jnp.float32)
    program = engine.lower().compile().as_text()
    assert re.findall(COLLECTIVES, program) == ["all-gather"]
    assert replica_groups(program) == {frozenset(pair) for pair in [(0, 1), (2, 3), (4, 5), (6, 7)]}


def replica_groups(program: str) -> set[frozenset[int]]:
    """Groups of the only collective, written out or as a transposed and reshaped iota."""
    if listed := re.search(r"replica_groups=\{(\{.*?\})\}", program):
        return {frozenset(map(int, group.split(","))) for group in re.findall(r"\{([\d,]+)\}", listed[1])}
    found = re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", program)
    assert found is not None
    shape, source, order = ([int(n) for n in text.split(",")] if text else None for text in found.groups())
    ids = np.arange(np.prod(source)).reshape(source)
    return {frozenset(group.tolist()) for group in ids.transpose(order).reshape(shape)}


def test_the_vanilla_axis_order_does_not_refine_and_moves_more() -> None:
    axes, kinds = ("data", "micro", "tensor"), (AxisType.Auto,) * 3
    mesh = Mesh(np.asarray(jax.devices()).reshape(2, 2, 2), axes, axis_types=kinds)
    train = NamedSharding(mesh, PartitionSpec(None, ("micro", "tensor")))
    generate = NamedSharding(mesh, PartitionSpec(None, "tensor"))
    ours = mesh_of(data=2, tensor=4, generation=2)
    assert not refines(train, generate, (16, 64))
    assert missing_bytes(train, generate, SHAPES["w"]) > missing_bytes(
        NamedSharding(ours, PartitionSpec(None, ("tensor", "micro_tensor"))),
        NamedSharding(ours, PartitionSpec(None, "tensor")),
        SHAPES["w"],
    )


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_there_and_back_keeps_every_weight(dtype: jnp.dtype) -> None:
    config = ModelConfig("qwen2", 64, 32, 64, 2, 4, 4, 8, qkv_bias=True)
    mesh = factored_mesh(Layout(fsdp=2, tensor=4, generation_tensor=2), jax.devices())
    dims, shapes = param_dims(config, "lm"), param_shapes(config, "lm", jnp.float32)
    engine = HybridEngine(mesh, dims, shapes, dtype=dtype)
    params = jax.jit(lambda key: init_params(config, "lm", key), out_shardings=engine.train)(jax.random.key(0))
    before = jax.tree.map(np.asarray, params)
    weights, switch = engine.to_generation(params)
    for new, old, layout in zip(*map(jax.tree.leaves, (weights, before, engine.generate)), strict=True):
        assert new.sharding.is_equivalent_to(layout, new.ndim)
        vector = new.ndim < 3 and new.shape[-1] == 32  # norm scales, stacked or not, keep their precision
        assert new.dtype == (jnp.float32 if vector and new.shape[0] != 64 else dtype)
        np.testing.assert_array_equal(np.asarray(new), old.astype(new.dtype))
    assert switch.bytes_per_device == engine.bytes_per_device > 0
    engine.to_training(weights)
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, params), before)
    moved = [x for x, y in zip(jax.tree.leaves(weights), jax.tree.leaves(params), strict=True) if x is not y]
    assert moved
    assert all(leaf.is_deleted() for leaf in moved)


def test_equal_layouts_share_their_buffers() -> None:
    engine = HybridEngine(mesh_of(data=8, tensor=1, generation=1), DIMS, SHAPES, dtype=jnp.float32)
    params = {"w": jax.device_put(jnp.ones((16, 64)), engine.train["w"])}
    weights, switch = engine.to_generation(params)
    assert weights["w"] is params["w"]
    assert switch.bytes_per_device == 0
    engine.to_training(weights)
    assert not params["w"].is_deleted()


def test_a_layout_that_does_not_fill_the_devices_says_what_would() -> None:
    with pytest.raises(
        ValueError, match=r"actor: data=rest x fsdp=1 x stage=1 x tensor=3 does not fill 8 devices.*1, 2, 4, 8"
    ):
        factored_mesh(Layout(tensor=3, generation_tensor=1), jax.devices())


def test_a_dimension_that_does_not_split_is_named() -> None:
    mesh = mesh_of(data=2, tensor=4, generation=2)
    shapes = {"w": jax.ShapeDtypeStruct((16, 6), jnp.float32)}
    with pytest.raises(ValueError, match=r"critic: the model's 'mlp' dimension of 6 does not split 4 ways"):
        check_divisible(mesh, DIMS, shapes, TRAIN, role="critic")
    check_divisible(mesh, DIMS, shapes, GENERATE, role="critic")


def test_rules_name_axes_by_dimension() -> None:
    mesh = mesh_of(data=2, tensor=4, generation=2)
    tree = shardings(mesh, {"a": ("layers", "embed", "heads", None)}, TRAIN)
    assert tree["a"].spec == PartitionSpec(("stage", "micro_stage"), "fsdp", ("tensor", "micro_tensor"), None)
