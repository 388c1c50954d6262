"""Qwen2, Qwen3 and Qwen3-MoE; config.json may switch on a window in later layers."""

from typing import Any

from jaxrlhf.models.config import Experts, ModelConfig
from jaxrlhf.models.huggingface.families.family import DECODER, QK_NORM, QKV_BIAS, Family, mixture
from jaxrlhf.models.huggingface.families.fields import Fields
from jaxrlhf.models.huggingface.families.windows import read_optional_window, write_optional_window


def _read_qwen2(given: Fields) -> dict[str, Any]:
    given.only("use_mrope", False)
    return {"qkv_bias": True, **read_optional_window(given)}


QWEN2 = Family("qwen2", "Qwen2", lambda config: DECODER | QKV_BIAS, _read_qwen2, write_optional_window)
"""Qwen2 and Qwen2.5: biases on q, k and v."""


def _read_qwen3(given: Fields) -> dict[str, Any]:
    given.only("attention_bias", False)
    given.default(head_dim=128)
    return {"qk_norm": True, **read_optional_window(given)}


QWEN3 = Family(
    "qwen3",
    "Qwen3",
    lambda config: DECODER | QK_NORM,
    _read_qwen3,
    lambda config: {"attention_bias": False, **write_optional_window(config)},
)
"""Qwen3 (dense): normalized q and k heads, head width independent of the hidden size."""


def _read_qwen3_moe(given: Fields) -> dict[str, Any]:
    given.only("attention_bias", False)
    given.only("hidden_act", "silu")
    given.only("decoder_sparse_step", 1)
    given.only("mlp_only_layers", [])
    # transformers 5 writes num_local_experts, older versions num_experts.
    count = given.take("num_local_experts") or given.take("num_experts", 128)
    given.take("num_experts")
    experts = Experts(
        count=count,
        per_token=given.take("num_experts_per_tok", 8),
        intermediate_size=given.need("moe_intermediate_size"),
        normalised=bool(given.take("norm_topk_prob", False)),
        loss_coefficient=float(given.take("router_aux_loss_coef", 0.001)),
    )
    return {"qk_norm": True, "experts": experts, **read_optional_window(given)}


def write_experts(experts: Experts) -> dict[str, Any]:
    """Return the fields of a mixture of experts in every layer."""
    return {
        "num_experts": experts.count,
        "num_experts_per_tok": experts.per_token,
        "moe_intermediate_size": experts.intermediate_size,
        "norm_topk_prob": experts.normalised,
        "router_aux_loss_coef": experts.loss_coefficient,
    }


def _write_qwen3_moe(config: ModelConfig) -> dict[str, Any]:
    assert config.experts is not None
    everywhere = {"attention_bias": False, "decoder_sparse_step": 1, "mlp_only_layers": []}
    return everywhere | write_experts(config.experts) | write_optional_window(config)


QWEN3_MOE = Family(
    "qwen3_moe",
    "Qwen3Moe",
    lambda config: mixture() | QK_NORM,
    _read_qwen3_moe,
    _write_qwen3_moe,
)
"""Qwen3-MoE: Qwen3 with a mixture of experts in every layer."""
