"""Tunix models from Qwen2 or Llama checkpoints, on one device."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from tunix.models.llama3 import model as llama3
from tunix.models.llama3 import params as llama3_params
from tunix.models.qwen2 import model as qwen2
from tunix.models.qwen2 import params as qwen2_params

MESH = jax.make_mesh((1, 1), ("fsdp", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)


def load(folder: Path, remat: qwen2.RematConfig = qwen2.RematConfig.NONE) -> Any:
    """Load a checkpoint as a Tunix model in float32."""
    shape = json.loads((folder / "config.json").read_text())
    rope = shape.get("rope_parameters", shape)
    common: dict[str, Any] = {
        "num_layers": shape["num_hidden_layers"],
        "vocab_size": shape["vocab_size"],
        "embed_dim": shape["hidden_size"],
        "hidden_dim": shape["intermediate_size"],
        "num_heads": shape["num_attention_heads"],
        "head_dim": shape.get("head_dim", shape["hidden_size"] // shape["num_attention_heads"]),
        "num_kv_heads": shape["num_key_value_heads"],
        "rope_theta": rope["rope_theta"],
        "norm_eps": shape["rms_norm_eps"],
    }
    params: Any = qwen2_params
    if shape["model_type"] == "llama":
        params = llama3_params
        config = llama3.ModelConfig(
            **common, weight_tying=shape["tie_word_embeddings"], remat_config=llama3.RematConfig[remat.name]
        )
    else:
        config = qwen2.ModelConfig(
            **common,
            use_tied_embedding=shape["tie_word_embeddings"],
            remat_config=remat,
            dtype=jnp.float32,
            param_dtype=jnp.float32,
        )
    return params.create_model_from_safe_tensors(str(folder), config, MESH, dtype=jnp.float32)
