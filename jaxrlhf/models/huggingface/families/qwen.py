"""Qwen2, Qwen3 and Qwen3-MoE; config.json may switch on a window in later layers."""

from typing import Any

from jaxrlhf.models.config import Experts, ModelConfig
from jaxrlhf.models.huggingface.families.family import DECODER, QK_NORM, QKV_BIAS, Family, mixture
from jaxrlhf.models.huggingface.families.fields import Fields, Link, written
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


EXPERTS = (
    Link("num_experts", "count"),
    Link("num_experts_per_tok", "per_token"),
    Link("moe_intermediate_size", "intermediate_size"),
    Link("norm_topk_prob", "normalised", True, bool),
    Link("router_aux_loss_coef", "loss_coefficient", 0.001, float),
)
"""Fields of a mixture of experts in every layer."""


def _read_qwen3_moe(given: Fields) -> dict[str, Any]:
    given.only("attention_bias", False)
    given.only("hidden_act", "silu")
    given.only("decoder_sparse_step", 1)
    given.only("mlp_only_layers", [])
    experts = given.linked(EXPERTS, num_experts=128, num_experts_per_tok=8, norm_topk_prob=False)
    # transformers 5 writes num_local_experts, older versions num_experts.
    experts["count"] = given.take("num_local_experts") or experts["count"]
    return {"qk_norm": True, "experts": Experts(**experts), **read_optional_window(given)}


def _write_qwen3_moe(config: ModelConfig) -> dict[str, Any]:
    everywhere = {"attention_bias": False, "decoder_sparse_step": 1, "mlp_only_layers": []}
    return everywhere | written(config.experts, EXPERTS) | write_optional_window(config)


QWEN3_MOE = Family(
    "qwen3_moe",
    "Qwen3Moe",
    lambda config: mixture() | QK_NORM,
    _read_qwen3_moe,
    _write_qwen3_moe,
)
"""Qwen3-MoE: Qwen3 with a mixture of experts in every layer."""
