"""Qwen3-MoE: Qwen3 with a mixture of experts in every layer."""

from collections.abc import Mapping
from typing import Any

from jaxrlhf.models.config import Experts, ModelConfig
from jaxrlhf.models.huggingface.families.family import QK_NORM, Family, StoredTensor
from jaxrlhf.models.huggingface.families.fields import Fields
from jaxrlhf.models.huggingface.families.mixture import mixture
from jaxrlhf.models.huggingface.families.windows import read_optional_window, write_optional_window


def read(given: Fields) -> dict[str, Any]:
    """What `ModelConfig` is beside the fields that all families share.

    Raises:
      Refusal: Some layers have no experts.
    """
    given.only("attention_bias", False)
    given.only("hidden_act", "silu")
    given.only("decoder_sparse_step", 1)
    given.only("mlp_only_layers", [])
    # transformers 5 writes the second name.
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


def write(config: ModelConfig) -> dict[str, Any]:
    """Fields of config.json beside those that all families share."""
    experts = config.experts
    assert experts is not None
    return {
        "attention_bias": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "num_experts": experts.count,
        "num_experts_per_tok": experts.per_token,
        "moe_intermediate_size": experts.intermediate_size,
        "norm_topk_prob": experts.normalised,
        "router_aux_loss_coef": experts.loss_coefficient,
        **write_optional_window(config),
    }


def tensors(config: ModelConfig) -> Mapping[str, StoredTensor]:
    """Where each parameter but the head is stored."""
    return mixture("mlp", gate="gate_proj", up="up_proj", down="down_proj") | QK_NORM


QWEN3_MOE = Family(
    name="qwen3_moe",
    causal="Qwen3MoeForCausalLM",
    classifier="Qwen3MoeForSequenceClassification",
    tensors=tensors,
    read=read,
    write=write,
)
