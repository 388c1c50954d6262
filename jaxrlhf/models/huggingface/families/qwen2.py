"""Qwen2 and Qwen2.5: biases on q, k and v; a window in later layers if it is switched on."""

from collections.abc import Mapping
from typing import Any

from jaxrlhf.models.config import ModelConfig
from jaxrlhf.models.huggingface.families.family import DECODER, QKV_BIAS, Family, StoredTensor
from jaxrlhf.models.huggingface.families.fields import Fields
from jaxrlhf.models.huggingface.families.windows import read_optional_window, write_optional_window


def read(given: Fields) -> dict[str, Any]:
    """What `ModelConfig` is beside the fields that all families share."""
    given.only("use_mrope", False)
    return {"qkv_bias": True, **read_optional_window(given)}


def write(config: ModelConfig) -> dict[str, Any]:
    """Fields of config.json beside those that all families share."""
    return write_optional_window(config)


def tensors(config: ModelConfig) -> Mapping[str, StoredTensor]:
    """Where each parameter but the head is stored."""
    return DECODER | QKV_BIAS


QWEN2 = Family(
    name="qwen2",
    causal="Qwen2ForCausalLM",
    classifier="Qwen2ForSequenceClassification",
    tensors=tensors,
    read=read,
    write=write,
)
