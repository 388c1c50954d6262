"""OLMo 2: norms come after attention and MLP, and one norm goes over all q heads, one over all k heads."""

from collections.abc import Mapping
from typing import Any

from jaxrlhf.models.config import ModelConfig
from jaxrlhf.models.huggingface.families.family import DECODER, LAYER, Family, StoredTensor
from jaxrlhf.models.huggingface.families.fields import Fields

_BEFORE = ("layers.attention_norm", "layers.mlp_norm")


def read(given: Fields) -> dict[str, Any]:
    """What `ModelConfig` is beside the fields that all families share."""
    given.only("attention_bias", False)
    given.default(rms_norm_eps=1e-5, num_key_value_heads=given.take("num_attention_heads"))
    return {"norms": "post", "qk_norm": True, "qk_norm_across_heads": True}


def write(config: ModelConfig) -> dict[str, Any]:
    """Fields of config.json beside those that all families share."""
    return {"attention_bias": False}


def tensors(config: ModelConfig) -> Mapping[str, StoredTensor]:
    """Where each parameter but the head is stored."""
    kept = {path: stored for path, stored in DECODER.items() if path not in _BEFORE}
    return kept | {
        "layers.attention_output_norm": StoredTensor(LAYER + "post_attention_layernorm.weight", "D", "D"),
        "layers.mlp_output_norm": StoredTensor(LAYER + "post_feedforward_layernorm.weight", "D", "D"),
        "layers.attention.query_norm": StoredTensor(LAYER + "self_attn.q_norm.weight", "NH", "NH"),
        "layers.attention.key_norm": StoredTensor(LAYER + "self_attn.k_norm.weight", "KH", "KH"),
    }


OLMO2 = Family(
    name="olmo2",
    causal="Olmo2ForCausalLM",
    classifier="Olmo2ForSequenceClassification",
    tensors=tensors,
    read=read,
    write=write,
)
