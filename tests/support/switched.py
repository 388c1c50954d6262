"""Weights to switch between layouts, and what devices hold of them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from compiled import live_bytes

from jaxrlhf.config import Layout
from jaxrlhf.models.config import ModelConfig
from jaxrlhf.models.parameters import param_dims, param_shapes
from jaxrlhf.resharding.hybrid import HybridEngine
from jaxrlhf.sharding.mesh import factored_mesh, generation_mesh, mesh_of

MODEL = ModelConfig("qwen2", 64, 32, 64, 2, 4, 4, 8, qkv_bias=True)
REFINING = Layout(fsdp=2, tensor=4, generation_tensor=2)
STAGES = Layout(stage=2, tensor=4, generation_tensor=2)
NOT_REFINING = Layout(fsdp=4, tensor=2, generation_tensor=4)


def model_engine(layout: Layout, *, dtype: Any, bucket_bytes: int = 2**30) -> HybridEngine:
    meshes = factored_mesh(layout, jax.devices()), generation_mesh(layout, jax.devices())
    dims, shapes = param_dims(MODEL, "lm"), param_shapes(MODEL, "lm")
    return HybridEngine.by_rules(*meshes, dims, shapes, dtype=dtype, bucket_bytes=bucket_bytes)


def model_params(engine: HybridEngine) -> Any:
    rng = np.random.default_rng(0)
    values = jax.tree.map(lambda x: rng.standard_normal(x.shape, np.float32), engine.generation_shapes)
    return jax.device_put(values, engine.train)


def on_host(tree: Any) -> Any:
    return jax.tree.map(np.array, tree)


def assert_equal(tree: Any, expected: Any) -> None:
    """Bit for bit, dtypes included."""
    assert jax.tree.structure(tree) == jax.tree.structure(expected)
    for new, old in zip(jax.tree.leaves(tree), jax.tree.leaves(expected), strict=True):
        assert new.dtype == old.dtype
        assert np.asarray(new).tobytes() == old.tobytes()


def assert_laid_out(tree: Any, layout: Any) -> None:
    for leaf, sharding in zip(jax.tree.leaves(tree), jax.tree.leaves(layout), strict=True):
        assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)


def grown(before: dict[int, int]) -> dict[int, int]:
    return {device: size - before[device] for device, size in live_bytes().items()}


def rows_engine(count: int, *, bucket_bytes: int, rows: int = 64) -> HybridEngine:
    """`count` equal leaves, split four ways in training and two in generation."""
    mesh = mesh_of({"data": 2, "tensor": 2, "micro_tensor": 2}, jax.devices())
    dims = {f"w{n}": ("mlp", None) for n in range(count)}
    shapes = {name: jax.ShapeDtypeStruct((rows, 16), jnp.float32) for name in dims}
    return HybridEngine.by_rules(mesh, mesh, dims, shapes, dtype=jnp.float32, bucket_bytes=bucket_bytes)


def rows_params(engine: HybridEngine) -> dict[str, jax.Array]:
    def build() -> dict[str, jax.Array]:
        shapes = enumerate(engine.generation_shapes.items())
        return {name: jnp.arange(x.size, dtype=x.dtype).reshape(x.shape) + n for n, (name, x) in shapes}

    return jax.jit(build, out_shardings=engine.train)()
