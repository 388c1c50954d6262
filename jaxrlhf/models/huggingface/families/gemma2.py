"""Gemma 2: soft caps, norms before and after, every second layer with a window, scaled embeddings."""

from collections.abc import Mapping
from typing import Any

from jaxrlhf.models.config import ModelConfig
from jaxrlhf.models.huggingface.families.family import DECODER, SANDWICH, Family, StoredTensor
from jaxrlhf.models.huggingface.families.fields import Fields
from jaxrlhf.models.huggingface.families.windows import read_layer_types, write_layer_types


def read(given: Fields) -> dict[str, Any]:
    """What `ModelConfig` is beside the fields that all families share."""
    layers = read_layer_types(given) or tuple(index % 2 == 0 for index in range(given.need("num_hidden_layers")))
    return read_gemma(given) | {
        "attn_logit_softcapping": given.take("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": given.take("final_logit_softcapping", 30.0),
        "sliding_window": given.take("sliding_window", 4096),
        "sliding_layers": layers,
    }


def read_gemma(given: Fields) -> dict[str, Any]:
    """What Gemma 2 and 3 share."""
    given.only("attention_bias", False)
    given.only("use_bidirectional_attention", False)
    # The first versions of Gemma's files had a wrong one, which is not read since.
    given.take("hidden_act")
    given.only("hidden_activation", "gelu_pytorch_tanh")
    given.default(head_dim=256)
    return {
        "activation": "gelu_tanh",
        "norms": "sandwich",
        "unit_offset": True,
        "scale_embeddings": True,
        "tie_embeddings": given.take("tie_word_embeddings", True),
        "query_pre_attn_scalar": given.take("query_pre_attn_scalar", 256),
    }


def write(config: ModelConfig) -> dict[str, Any]:
    """Fields of config.json beside those that all families share."""
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "query_pre_attn_scalar": config.query_pre_attn_scalar,
        "attn_logit_softcapping": config.attn_logit_softcapping,
        "final_logit_softcapping": config.final_logit_softcapping,
        "sliding_window": config.sliding_window,
        "layer_types": write_layer_types(config),
    }


def tensors(config: ModelConfig) -> Mapping[str, StoredTensor]:
    """Where each parameter but the head is stored."""
    return DECODER | SANDWICH


GEMMA2 = Family(
    name="gemma2",
    causal="Gemma2ForCausalLM",
    classifier="Gemma2ForSequenceClassification",
    tensors=tensors,
    read=read,
    write=write,
)
