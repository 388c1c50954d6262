"""Layouts, the meshes they factor devices into, and the rules that lay parameters out."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jaxrlhf.config import Layout
from jaxrlhf.sharding.mesh import AXES, factored_mesh, generation_mesh, mesh_of, replica_mesh
from jaxrlhf.sharding.rules import GENERATE, TRAIN, cast_shapes, check_divisible, shard_bytes, shardings


def sizes(mesh: jax.sharding.Mesh) -> dict[str, int]:
    return {axis: size for axis, size in mesh.shape.items() if size > 1}


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        (Layout(), {"data": 8}),
        (Layout(fsdp=4, tensor=2), {"fsdp": 4, "micro_tensor": 2}),
        (Layout(context=4, tensor=2), {"micro_context": 4, "micro_tensor": 2}),
        (Layout(context=4, generation_context=2, tensor=2), {"context": 2, "micro_context": 2, "micro_tensor": 2}),
        (Layout(tensor=4, generation_tensor=2), {"data": 2, "tensor": 2, "micro_tensor": 2}),
        (
            Layout(stage=4, tensor=2, generation_stage=2, generation_tensor=2),
            {"stage": 2, "micro_stage": 2, "tensor": 2},
        ),
    ],
)
def test_a_refining_layout_is_one_mesh(layout: Layout, expected: dict[str, int]) -> None:
    mesh = factored_mesh(layout, jax.devices())
    assert sizes(mesh) == expected
    assert mesh.axis_names == AXES
    assert list(mesh.devices.flat) == jax.devices()
    assert generation_mesh(layout, jax.devices()) is mesh


@pytest.mark.parametrize(
    ("layout", "training", "generation"),
    [
        (Layout(fsdp=4, tensor=2, generation_tensor=4), {"fsdp": 4, "tensor": 2}, {"data": 2, "tensor": 4}),
        (Layout(stage=2, generation_stage=4), {"data": 4, "stage": 2}, {"data": 2, "stage": 4}),
        (
            Layout(fsdp=4, context=2, generation_context=4, generation_tensor=2),
            {"fsdp": 4, "context": 2},
            {"context": 4, "tensor": 2},
        ),
    ],
)
def test_a_layout_that_does_not_refine_generates_on_a_mesh_of_its_own(
    layout: Layout, training: dict[str, int], generation: dict[str, int]
) -> None:
    assert not layout.refines
    assert sizes(factored_mesh(layout, jax.devices())) == training
    mesh = generation_mesh(layout, jax.devices())
    assert sizes(mesh) == generation
    assert list(mesh.devices.flat) == jax.devices()


def test_micro_sizes_are_the_quotients() -> None:
    layout = Layout(stage=6, tensor=8, generation_stage=2, generation_tensor=4)
    assert (layout.micro_stage, layout.micro_tensor) == (3, 2)


@pytest.mark.parametrize(
    "layout",
    [
        Layout(tensor=3),
        Layout(data=2, fsdp=2),
        Layout(data=3, stage=4),
        Layout(tensor=16),
        Layout(tensor=4, generation_tensor=3),
    ],
)  # fmt: skip
def test_sizes_that_do_not_fill_the_devices_say_what_would(refused, layout: Layout) -> None:
    with refused():
        generation_mesh(layout, jax.devices(), role="critic")


@pytest.mark.parametrize(
    ("layout", "split"),
    [
        (Layout(tensor=4, generation_tensor=2), {"tensor": 2}),
        (Layout(fsdp=8, generation_stage=2), {"stage": 2}),
        (Layout(fsdp=8, generation_context=2), {"context": 2}),
    ],
)
def test_a_pool_that_only_generates_is_filled_with_replicas(refused, layout: Layout, split: dict[str, int]) -> None:
    mesh = replica_mesh(layout, jax.devices()[2:], role="rollout")
    assert sizes(mesh) == {"data": 3} | split
    assert list(mesh.devices.flat) == jax.devices()[2:]
    with refused():
        replica_mesh(layout, jax.devices()[3:], role="rollout")


def test_a_dimension_that_does_not_split_is_named(refused) -> None:
    mesh = mesh_of({"data": 2, "tensor": 2, "micro_tensor": 2}, jax.devices())
    dims, shapes = {"w": (None, "mlp")}, {"w": jax.ShapeDtypeStruct((16, 6), jnp.float32)}
    with refused():
        check_divisible(mesh, dims, shapes, TRAIN, role="critic")
    check_divisible(mesh, dims, shapes, GENERATE, role="critic")


def test_rules_name_axes_by_dimension() -> None:
    mesh = mesh_of({"data": 8}, jax.devices())
    dims = {
        "query": ("layers", "embed", "heads", None),
        "table": ("vocab", "embed"),
        "gate": ("layers", "experts", "expert_embed", "mlp"),
    }
    train, generate = shardings(mesh, dims, TRAIN), shardings(mesh, dims, GENERATE)
    stages, tensors = ("stage", "micro_stage"), ("tensor", "micro_tensor")
    weights = "context", "micro_context", "fsdp", "expert"
    assert train["query"].spec == PartitionSpec(stages, weights, tensors, None)
    assert generate["query"].spec == PartitionSpec("stage", None, "tensor", None)
    assert train["table"].spec == PartitionSpec(("stage", "tensor", "micro_stage", "micro_tensor"), weights)
    assert generate["table"].spec == PartitionSpec(("stage", "tensor"), None)
    assert train["gate"].spec == PartitionSpec(stages, ("expert",), weights[:3], tensors)
    assert generate["gate"].spec == PartitionSpec("stage", ("expert",), None, "tensor")


def test_every_rule_names_axes_of_the_mesh() -> None:
    named = {axis for rules in (TRAIN, GENERATE) for axes in rules.values() for axis in np.atleast_1d(axes).tolist()}
    assert named < set(AXES)


def test_the_bytes_of_a_shard_count_every_split() -> None:
    mesh = mesh_of({"fsdp": 2, "stage": 2, "tensor": 2}, jax.devices())
    dims = {"w": ("layers", "embed", "mlp"), "scale": ("layers", None)}
    shapes = {"w": jax.ShapeDtypeStruct((4, 8, 16), jnp.float32), "scale": jax.ShapeDtypeStruct((4, 8), jnp.float32)}
    assert shard_bytes(shapes, shardings(mesh, dims, TRAIN)) == (4 * 8 * 16 // 8 + 4 * 8 // 2) * 4
    assert shard_bytes(shapes, shardings(mesh, dims, GENERATE)) == (4 * 8 * 16 // 4 + 4 * 8 // 2) * 4


def test_scales_of_norms_are_not_cast() -> None:
    dims = {
        "table": ("vocab", "embed"),
        "stacked": ("layers", None),
        "last": (None,),
        "bias": ("layers", "heads", None),
    }
    shapes = jax.tree.map(
        lambda names: jax.ShapeDtypeStruct((2,) * len(names), jnp.float32), dims, is_leaf=lambda x: isinstance(x, tuple)
    )
    dtypes = jax.tree.map(lambda x: x.dtype, cast_shapes(dims, shapes, dtype=jnp.bfloat16))
    assert dtypes == {"table": jnp.bfloat16, "stacked": jnp.float32, "last": jnp.float32, "bias": jnp.bfloat16}
