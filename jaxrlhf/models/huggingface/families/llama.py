"""Llama 2 and 3.x: no biases, rotary frequencies stretched from 3.1 on."""

from collections.abc import Mapping
from typing import Any

from jaxrlhf.models.config import ModelConfig
from jaxrlhf.models.huggingface.families.family import DECODER, Family, StoredTensor
from jaxrlhf.models.huggingface.families.fields import Fields


def read(given: Fields) -> dict[str, Any]:
    """What `ModelConfig` is beside the fields that all families share."""
    given.only("attention_bias", False)
    given.only("mlp_bias", False)
    given.default(num_key_value_heads=given.take("num_attention_heads"))
    return {}


def write(config: ModelConfig) -> dict[str, Any]:
    """Fields of config.json beside those that all families share."""
    return {"attention_bias": False, "mlp_bias": False}


def tensors(config: ModelConfig) -> Mapping[str, StoredTensor]:
    """Where each parameter but the head is stored."""
    return DECODER


LLAMA = Family(
    name="llama",
    causal="LlamaForCausalLM",
    classifier="LlamaForSequenceClassification",
    tensors=tensors,
    read=read,
    write=write,
)
