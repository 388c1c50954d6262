"""The workloads' checkpoints as models of Tunix, on one device."""

from pathlib import Path

import bench_workload as bench
import jax
import jax.numpy as jnp
from tunix.models.qwen2 import model as qwen2
from tunix.models.qwen2 import params as qwen2_params

MESH = jax.make_mesh((1, 1), ("fsdp", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)


def load(name: str, models: Path, remat: qwen2.RematConfig = qwen2.RematConfig.NONE) -> qwen2.Qwen2:
    """The weights of a preset, in float32."""
    preset = bench.PRESETS[name]
    shape = qwen2.ModelConfig(
        num_layers=preset.layers,
        vocab_size=preset.vocab,
        embed_dim=preset.hidden,
        hidden_dim=preset.inner,
        num_heads=preset.heads,
        head_dim=preset.hidden // preset.heads,
        num_kv_heads=preset.kv_heads,
        rope_theta=1_000_000,
        norm_eps=1e-6,
        use_tied_embedding=preset.tied,
        remat_config=remat,
        dtype=jnp.float32,
        param_dtype=jnp.float32,
    )
    place = bench.checkpoint(name, models)
    return qwen2_params.create_model_from_safe_tensors(str(place), shape, MESH, dtype=jnp.float32)
