"""Mistral: every layer has a window, unless the file says null."""

from collections.abc import Mapping
from typing import Any

from jaxrlhf.models.config import ModelConfig
from jaxrlhf.models.huggingface.families.family import DECODER, Family, StoredTensor
from jaxrlhf.models.huggingface.families.fields import Fields


def read(given: Fields) -> dict[str, Any]:
    """What `ModelConfig` is beside the fields that all families share."""
    given.default(num_key_value_heads=8)
    return {"sliding_window": given.take("sliding_window", 4096)}


def write(config: ModelConfig) -> dict[str, Any]:
    """Fields of config.json beside those that all families share."""
    return {"sliding_window": config.sliding_window}


def tensors(config: ModelConfig) -> Mapping[str, StoredTensor]:
    """Where each parameter but the head is stored."""
    return DECODER


MISTRAL = Family(
    name="mistral",
    causal="MistralForCausalLM",
    classifier="MistralForSequenceClassification",
    tensors=tensors,
    read=read,
    write=write,
)
