"""Checkpoints of Qwen2's shape as models of Tunix, on one device."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
from tunix.models.qwen2 import model as qwen2
from tunix.models.qwen2 import params as qwen2_params

MESH = jax.make_mesh((1, 1), ("fsdp", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)


def load(folder: Path, remat: qwen2.RematConfig = qwen2.RematConfig.NONE) -> qwen2.Qwen2:
    """The weights of a checkpoint, in float32."""
    shape = json.loads((folder / "config.json").read_text())
    config = qwen2.ModelConfig(
        num_layers=shape["num_hidden_layers"],
        vocab_size=shape["vocab_size"],
        embed_dim=shape["hidden_size"],
        hidden_dim=shape["intermediate_size"],
        num_heads=shape["num_attention_heads"],
        head_dim=shape.get("head_dim", shape["hidden_size"] // shape["num_attention_heads"]),
        num_kv_heads=shape["num_key_value_heads"],
        rope_theta=shape["rope_theta"],
        norm_eps=shape["rms_norm_eps"],
        use_tied_embedding=shape["tie_word_embeddings"],
        remat_config=remat,
        dtype=jnp.float32,
        param_dtype=jnp.float32,
    )
    return qwen2_params.create_model_from_safe_tensors(str(folder), config, MESH, dtype=jnp.float32)
