"""Mixtral: Mistral with a mixture of experts in every layer, whose weights add up to 1."""

from collections.abc import Mapping
from typing import Any

from jaxrlhf.models.config import Experts, ModelConfig
from jaxrlhf.models.huggingface.families.family import Family, StoredTensor
from jaxrlhf.models.huggingface.families.fields import Fields
from jaxrlhf.models.huggingface.families.mixture import mixture


def read(given: Fields) -> dict[str, Any]:
    """What `ModelConfig` is beside the fields that all families share."""
    given.only("hidden_act", "silu")
    given.only("router_jitter_noise", 0.0)
    given.default(num_key_value_heads=8, rms_norm_eps=1e-5, rope_theta=1e6)
    experts = Experts(
        count=given.take("num_local_experts", 8),
        per_token=given.take("num_experts_per_tok", 2),
        intermediate_size=given.need("intermediate_size"),
        loss_coefficient=float(given.take("router_aux_loss_coef", 0.001)),
    )
    return {"experts": experts, "sliding_window": given.take("sliding_window")}


def write(config: ModelConfig) -> dict[str, Any]:
    """Fields of config.json beside those that all families share."""
    experts = config.experts
    assert experts is not None
    return {
        "intermediate_size": experts.intermediate_size,
        "num_local_experts": experts.count,
        "num_experts_per_tok": experts.per_token,
        "router_aux_loss_coef": experts.loss_coefficient,
        "router_jitter_noise": 0.0,
        "sliding_window": config.sliding_window,
    }


def tensors(config: ModelConfig) -> Mapping[str, StoredTensor]:
    """Where each parameter but the head is stored."""
    return mixture("block_sparse_moe", gate="w1", up="w3", down="w2")


MIXTRAL = Family(
    name="mixtral",
    causal="MixtralForCausalLM",
    classifier="MixtralForSequenceClassification",
    tensors=tensors,
    read=read,
    write=write,
)
