"""Qwen3 (dense): normalised q and k heads, head width free of the hidden size."""

from collections.abc import Mapping
from typing import Any

from jaxrlhf.models.config import ModelConfig
from jaxrlhf.models.huggingface.families.family import DECODER, QK_NORM, Family, StoredTensor
from jaxrlhf.models.huggingface.families.fields import Fields
from jaxrlhf.models.huggingface.families.windows import read_optional_window, write_optional_window


def read(given: Fields) -> dict[str, Any]:
    """What `ModelConfig` is beside the fields that all families share."""
    given.only("attention_bias", False)
    given.default(head_dim=128)
    return {"qk_norm": True, **read_optional_window(given)}


def write(config: ModelConfig) -> dict[str, Any]:
    """Fields of config.json beside those that all families share."""
    return {"attention_bias": False, **write_optional_window(config)}


def tensors(config: ModelConfig) -> Mapping[str, StoredTensor]:
    """Where each parameter but the head is stored."""
    return DECODER | QK_NORM


QWEN3 = Family(
    name="qwen3",
    causal="Qwen3ForCausalLM",
    classifier="Qwen3ForSequenceClassification",
    tensors=tensors,
    read=read,
    write=write,
)
