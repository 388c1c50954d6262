"""Gemma 1 to 3: scaled embeddings; from Gemma 2 on norms before and after, and a window in some layers."""

from typing import Any

from jaxrlhf.models.huggingface.families.family import DECODER, QK_NORM, Family, in_layers
from jaxrlhf.models.huggingface.families.fields import Fields
from jaxrlhf.models.huggingface.families.rope_fields import read_two_ropes
from jaxrlhf.models.huggingface.families.windows import read_layer_types

FULL_THETA, SLIDING_THETA = 1_000_000.0, 10_000.0
"""Default bases of the rotary frequencies: of layers without a window, and of layers with a window."""

SANDWICHED = DECODER | in_layers(
    attention_output_norm=("post_attention_layernorm.weight", "D", "D"),
    mlp_norm=("pre_feedforward_layernorm.weight", "D", "D"),
    mlp_output_norm=("post_feedforward_layernorm.weight", "D", "D"),
)


def read_gemma(given: Fields) -> dict[str, Any]:
    """Read the fields that all versions share."""
    given.only("attention_bias", False)
    given.only("hidden_activation", "gelu_pytorch_tanh")
    given.default(head_dim=256)
    return {
        "activation": "gelu_tanh",
        "norms": "sandwich",
        "scale_embeddings": True,
        "tie_embeddings": given.take("tie_word_embeddings", True),
    }


def _read_gemma1(given: Fields) -> dict[str, Any]:
    given.only("use_bidirectional_attention", False)
    # Published files say gelu and mean its approximation by tanh.
    given.take("hidden_act")
    given.default(num_key_value_heads=16)
    return {**read_gemma(given), "norms": "pre", "unit_offset": True}


GEMMA = Family("gemma", "Gemma", lambda config: DECODER, _read_gemma1)
"""Gemma 1: norms only before attention and MLP, no windows, no soft caps."""


def read_own_ropes(given: Fields) -> dict[str, Any]:
    """Read the rotary positions of layers without and with a window; older files have two fields for the bases."""
    full, sliding = given.take("rope_theta", FULL_THETA), given.take("rope_local_base_freq", SLIDING_THETA)
    return read_two_ropes(given, full_theta=full, sliding_theta=sliding)


def _read_first(given: Fields) -> dict[str, Any]:
    """Read the fields that versions 2 and 3 share."""
    given.only("use_bidirectional_attention", False)
    # Early Gemma files had a wrong value here; the field is no longer used.
    given.take("hidden_act")
    return {
        **read_gemma(given),
        "unit_offset": True,
        "query_pre_attn_scalar": given.take("query_pre_attn_scalar", 256),
        "sliding_window": given.take("sliding_window", 4096),
    }


def _read_gemma2(given: Fields) -> dict[str, Any]:
    return {
        **_read_first(given),
        "attn_logit_softcapping": given.take("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": given.take("final_logit_softcapping", 30.0),
        "sliding_layers": read_layer_types(given, every=2),
    }


GEMMA2 = Family("gemma2", "Gemma2", lambda config: SANDWICHED, _read_gemma2)
"""Gemma 2: soft caps, and a window in every second layer."""


def _read_gemma3(given: Fields) -> dict[str, Any]:
    # transformers reads this field, but nothing computes it.
    given.only("attn_logit_softcapping")
    patterns = [given.take(name) for name in ("sliding_window_pattern", "_sliding_window_pattern")]
    return {
        **_read_first(given),
        "qk_norm": True,
        "final_logit_softcapping": given.take("final_logit_softcapping"),
        "sliding_layers": read_layer_types(given, every=patterns[0] or patterns[1] or 6),
        **read_own_ropes(given),
    }


GEMMA3 = Family(
    "gemma3_text",
    "Gemma3",
    lambda config: SANDWICHED | QK_NORM,
    _read_gemma3,
    score_architecture="Gemma3Text",
)
"""Gemma 3 (text): normalized q and k heads; five layers with a window, which have another rotary base, to one
without a window."""
