"""Sharding rules: two tables that map the named dimensions of parameters to mesh axes."""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jaxrlhf.config import Refusal
from jaxrlhf.sharding.mesh import EXPERT_AXES, STAGE_AXES, TENSOR_AXES, TOKEN_AXES, WIDTH_AXES

Rules = Mapping[str, str | tuple[str, ...]]

Dim = str | tuple[str, int] | None
"""Name of a dimension. With a count, the dimension is not split over mesh axes that do not divide the count."""

TRAIN: Rules = {
    "layers": STAGE_AXES,
    "embed": WIDTH_AXES,
    "experts": EXPERT_AXES,
    "expert_embed": (*TOKEN_AXES, "fsdp"),
    "heads": TENSOR_AXES,
    "kv_heads": TENSOR_AXES,
    "mlp": TENSOR_AXES,
    # Unlike in the mesh, the generation axes come first, so that training shards refine generation shards.
    "vocab": ("stage", "tensor", "micro_stage", "micro_tensor"),
}

GENERATE: Rules = {
    "layers": "stage",
    "experts": EXPERT_AXES,
    "heads": "tensor",
    "kv_heads": "tensor",
    "mlp": "tensor",
    "vocab": ("stage", "tensor"),
}

STACKED = ("layers", "tower_layers")
"""Dimensions that count stacked layers; no part of a matrix. The layers of a vision tower are never split."""


def _is_dims(node: Any) -> bool:
    return isinstance(node, tuple)


def shardings(mesh: Mesh | AbstractMesh, dims: Any, rules: Rules) -> Any:
    """Return a tree of `NamedSharding` for a tree of dimension names; unnamed dimensions are not split."""

    def one(names: tuple[Dim, ...]) -> NamedSharding:
        return NamedSharding(mesh, PartitionSpec(*(_axes(mesh, name, rules) or None for name in names)))

    return jax.tree.map(one, dims, is_leaf=_is_dims)


def _axes(mesh: Mesh | AbstractMesh, dim: Dim, rules: Rules) -> str | tuple[str, ...]:
    """Return the mesh axes that split a dimension."""
    if not isinstance(dim, tuple):
        return rules.get(dim, ()) if dim else ()
    name, count = dim
    axes = rules.get(name, ())
    while isinstance(axes, tuple) and count % _ways(mesh, axes):
        axes = axes[:-1]
    return () if count % _ways(mesh, axes) else axes


def _ways(mesh: Mesh | AbstractMesh, axes: str | tuple[str, ...]) -> int:
    return math.prod(mesh.shape[axis] for axis in ((axes,) if isinstance(axes, str) else axes))


def cast_shapes(dims: Any, shapes: Any, *, dtype: Any) -> Any:
    """Return the shapes of a copy of the parameters in `dtype`.

    Vectors (scales of norms) keep their dtype: a model multiplies by the scales in float32, so a rounded scale would
    give the copy other outputs than the master weights. Integers also keep their dtype.
    """

    def one(names: tuple[Dim, ...], array: Any) -> Any:
        matrix = len([name for name in names if name not in STACKED]) > 1
        cast = matrix and jnp.issubdtype(array.dtype, jnp.floating)
        return jax.ShapeDtypeStruct(array.shape, dtype if cast else array.dtype)

    return jax.tree.map(one, dims, shapes, is_leaf=_is_dims)


def check_divisible(mesh: Mesh | AbstractMesh, dims: Any, shapes: Any, rules: Rules, *, role: str) -> None:
    """Refuse a layout that does not fit a model.

    Raises:
      Refusal: A dimension does not split evenly over the axes of its rule; or the layout divides experts, and the model
        has none; or layers with experts are divided over stages, which JAX cannot differentiate yet.
    """
    mixture = any("experts" in names for names in jax.tree.leaves(dims, is_leaf=_is_dims))
    experts, stages = (math.prod(mesh.shape.get(axis, 1) for axis in axes) for axes in (EXPERT_AXES, STAGE_AXES))
    if experts > 1 and not mixture:
        raise Refusal(f"{role}: expert={experts} requires a model with experts; set expert=1 and fsdp={experts}")
    if stages > 1 and mixture:
        raise Refusal(f"{role}: stage={stages} does not support layers with experts; set stage=1 and expert={stages}")

    def one(names: tuple[Dim, ...], array: Any) -> None:
        for name, size in zip(names, array.shape, strict=True):
            axes = _axes(mesh, name, rules)
            if size % (ways := _ways(mesh, axes)):
                sizes = [n for n in range(1, size + 1) if size % n == 0]
                raise Refusal(
                    f"{role}: the model's {name!r} dimension of {size} does not split {ways} ways (mesh axes "
                    f"{' x '.join([axes] if isinstance(axes, str) else axes)}); supported splits are {sizes[:8]}"
                )

    jax.tree.map(one, dims, shapes, is_leaf=_is_dims)


def shard_bytes(shapes: Any, layout: Any) -> int:
    """Return the bytes that one device holds of a tree of shaped arrays under a tree of shardings."""
    pairs = zip(*map(jax.tree.leaves, (shapes, layout)), strict=True)
    return sum(math.prod(sharding.shard_shape(array.shape)) * array.dtype.itemsize for array, sharding in pairs)
