"""Gemma 2 and 3: norms before and after, scaled embeddings, layers with a window between others."""

from typing import Any

from jaxrlhf.models.config import ModelConfig
from jaxrlhf.models.huggingface.families.family import DECODER, QK_NORM, Family, in_layers
from jaxrlhf.models.huggingface.families.fields import Fields
from jaxrlhf.models.huggingface.families.rope_fields import read_two_ropes, write_two_ropes
from jaxrlhf.models.huggingface.families.windows import read_layer_types, write_layer_types

_FULL_THETA, _SLIDING_THETA = 1_000_000.0, 10_000.0

_TENSORS = DECODER | in_layers(
    attention_output_norm=("post_attention_layernorm.weight", "D", "D"),
    mlp_norm=("pre_feedforward_layernorm.weight", "D", "D"),
    mlp_output_norm=("post_feedforward_layernorm.weight", "D", "D"),
)


def _read_gemma(given: Fields) -> dict[str, Any]:
    """Fields of both versions."""
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


def _read_gemma2(given: Fields) -> dict[str, Any]:
    layers = read_layer_types(given) or tuple(index % 2 == 0 for index in range(given.need("num_hidden_layers")))
    return _read_gemma(given) | {
        "attn_logit_softcapping": given.take("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": given.take("final_logit_softcapping", 30.0),
        "sliding_window": given.take("sliding_window", 4096),
        "sliding_layers": layers,
    }


def _write_gemma2(config: ModelConfig) -> dict[str, Any]:
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "query_pre_attn_scalar": config.query_pre_attn_scalar,
        "attn_logit_softcapping": config.attn_logit_softcapping,
        "final_logit_softcapping": config.final_logit_softcapping,
        "sliding_window": config.sliding_window,
        "layer_types": write_layer_types(config),
    }


GEMMA2 = Family("gemma2", "Gemma2", lambda config: _TENSORS, _read_gemma2, _write_gemma2)
"""Gemma 2: soft caps, and a window in every second layer."""


def _read_gemma3(given: Fields) -> dict[str, Any]:
    # Read by transformers, and computed by nobody.
    given.only("attn_logit_softcapping")
    pattern = given.take("sliding_window_pattern") or given.take("_sliding_window_pattern") or 6
    given.take("_sliding_window_pattern")
    count = given.need("num_hidden_layers")
    return _read_gemma(given) | {
        "qk_norm": True,
        "final_logit_softcapping": given.take("final_logit_softcapping"),
        "sliding_window": given.take("sliding_window", 4096),
        "sliding_layers": read_layer_types(given) or tuple(index % pattern != pattern - 1 for index in range(count)),
        **read_two_ropes(
            given,
            full_theta=given.take("rope_theta", _FULL_THETA),
            sliding_theta=given.take("rope_local_base_freq", _SLIDING_THETA),
        ),
    }


def _write_gemma3(config: ModelConfig) -> dict[str, Any]:
    ropes = write_two_ropes(config)
    near = ropes["rope_parameters"]["sliding_attention"]["rope_theta"]
    return _write_gemma2(config) | ropes | {"rope_local_base_freq": near}


GEMMA3 = Family(
    "gemma3_text",
    "Gemma3",
    lambda config: _TENSORS | QK_NORM,
    _read_gemma3,
    _write_gemma3,
    score_architecture="Gemma3Text",
)
"""Gemma 3 (text): normalised heads, five layers with a window and a rotary base of its own to one without."""
