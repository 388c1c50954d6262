"""GLM-4 and GLM-4-MoE (GLM-4.5 to 4.7): half of each head is rotated."""

from typing import Any

from jaxrlhf.models.config import ModelConfig
from jaxrlhf.models.huggingface.families.deepseek import read_grouped_experts
from jaxrlhf.models.huggingface.families.family import (
    DECODER,
    MTP_AFTER_LAYERS,
    QK_NORM,
    QKV_BIAS,
    ROUTER_BIAS,
    SHARED_EXPERTS,
    Family,
    StoredTensor,
    after_dense_layers,
    gate_and_up,
    in_layers,
    mixture,
)
from jaxrlhf.models.huggingface.families.fields import Fields

_HALF = 0.5
"""Default part of each head that is rotated."""


def _read_glm4(given: Fields) -> dict[str, Any]:
    given.default(num_key_value_heads=2, head_dim=128, rms_norm_eps=1.5625e-07, partial_rotary_factor=_HALF)
    return {"norms": "sandwich", "rope_interleaved": True, "qkv_bias": bool(given.take("attention_bias", True))}


def _glm4_tensors(config: ModelConfig) -> dict[str, StoredTensor]:
    norms = in_layers(
        attention_output_norm=("post_self_attn_layernorm.weight", "D", "D"),
        mlp_output_norm=("post_mlp_layernorm.weight", "D", "D"),
    )
    return DECODER | gate_and_up(config.intermediate_size) | norms | (QKV_BIAS if config.qkv_bias else {})


GLM4 = Family("glm4", "Glm4", _glm4_tensors, _read_glm4)
"""GLM-4 (dense): norms before and after, biases, neighboring numbers of a head rotated together."""


def _read_glm4_moe(given: Fields) -> dict[str, Any]:
    for name in ("num_nextn_predict_layers", "num_mtp_layers"):
        given.take(name)  # for speculation
    given.default(num_key_value_heads=8, rms_norm_eps=1e-5, partial_rotary_factor=_HALF)
    return {
        "experts": read_grouped_experts(given, scores="sigmoid", bias=True),
        "dense_layers": given.take("first_k_dense_replace", 1),
        "qkv_bias": bool(given.take("attention_bias", False)),
        "qk_norm": bool(given.take("use_qk_norm", False)),
    }


def _glm4_moe_tensors(config: ModelConfig) -> dict[str, StoredTensor]:
    attention = (QKV_BIAS if config.qkv_bias else {}) | (QK_NORM if config.qk_norm else {})
    sparse = mixture() | SHARED_EXPERTS | ROUTER_BIAS
    return after_dense_layers(config, sparse | attention, DECODER | attention)


GLM4_MOE = Family("glm4_moe", "Glm4Moe", _glm4_moe_tensors, _read_glm4_moe, mtp=MTP_AFTER_LAYERS)
"""GLM-4-MoE: experts as in DeepSeek-V3, after a few dense layers."""
