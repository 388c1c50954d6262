"""Phi-3, Phi-3.5 and Phi-4: q, k and v lie in one tensor, gate and up in another; part of each head is rotated."""

from collections.abc import Mapping
from typing import Any

from jaxrlhf.models.config import LongRope, ModelConfig
from jaxrlhf.models.huggingface.families.family import DECODER, LAYER, Family, StoredTensor
from jaxrlhf.models.huggingface.families.fields import Fields

_QKV, _GATE_UP = LAYER + "self_attn.qkv_proj.weight", LAYER + "mlp.gate_up_proj.weight"


def read(given: Fields) -> dict[str, Any]:
    """What `ModelConfig` is beside the fields that all families share."""
    for name in ("attention_bias", "mlp_bias", "lm_head_bias"):
        given.only(name, False)
    for name in ("full_attn_mod", "interpolate_factor"):
        given.only(name, 1)
    given.default(
        rms_norm_eps=1e-5,
        num_key_value_heads=given.take("num_attention_heads"),
        original_max_position_embeddings=4096,
    )
    return {"sliding_window": given.take("sliding_window")}


def write(config: ModelConfig) -> dict[str, Any]:
    """Fields of config.json beside those that all families share."""
    original = {}
    if isinstance(config.rope_scaling, LongRope):
        original = {"original_max_position_embeddings": config.rope_scaling.original_max_position_embeddings}
    return {"sliding_window": config.sliding_window, **original}


def tensors(config: ModelConfig) -> Mapping[str, StoredTensor]:
    """Where each parameter but the head is stored."""
    heads, kv_heads = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    rows = heads + 2 * kv_heads
    inner = config.intermediate_size
    return DECODER | {
        "layers.attention.query": StoredTensor(_QKV, "DNH", "NH D", 0, rows),
        "layers.attention.key": StoredTensor(_QKV, "DKH", "KH D", heads, rows),
        "layers.attention.value": StoredTensor(_QKV, "DKH", "KH D", heads + kv_heads, rows),
        "layers.mlp.gate": StoredTensor(_GATE_UP, "DF", "F D", 0, 2 * inner),
        "layers.mlp.up": StoredTensor(_GATE_UP, "DF", "F D", inner, 2 * inner),
    }


PHI3 = Family(
    name="phi3",
    causal="Phi3ForCausalLM",
    classifier="Phi3ForSequenceClassification",
    tensors=tensors,
    read=read,
    write=write,
)
