"""Gemma 3 (text): normalised heads, five layers with a window and a rotary base of its own to one without."""

from collections.abc import Mapping
from typing import Any

from jaxrlhf.models.config import ModelConfig
from jaxrlhf.models.huggingface.families import gemma2
from jaxrlhf.models.huggingface.families.family import DECODER, QK_NORM, SANDWICH, Family, StoredTensor
from jaxrlhf.models.huggingface.families.fields import Fields
from jaxrlhf.models.huggingface.families.rope_fields import parse_rope, rope_dictionary
from jaxrlhf.models.huggingface.families.windows import read_layer_types, write_layer_types

_FULL_THETA, _SLIDING_THETA = 1_000_000.0, 10_000.0


def read(given: Fields) -> dict[str, Any]:
    """What `ModelConfig` is beside the fields that all families share."""
    # Read by transformers, and computed by nobody.
    given.only("attn_logit_softcapping")
    pattern = given.take("sliding_window_pattern") or given.take("_sliding_window_pattern") or 6
    given.take("_sliding_window_pattern")
    count = given.need("num_hidden_layers")
    return gemma2.read_gemma(given) | {
        "qk_norm": True,
        "final_logit_softcapping": given.take("final_logit_softcapping"),
        "sliding_window": given.take("sliding_window", 4096),
        "sliding_layers": read_layer_types(given) or tuple(index % pattern != pattern - 1 for index in range(count)),
        **_read_ropes(given),
    }


def _read_ropes(given: Fields) -> dict[str, Any]:
    """Two kinds of layers: `rope_parameters` has them since transformers 5."""
    ropes = given.take("rope_parameters") or {}
    full = {"rope_theta": given.take("rope_theta", _FULL_THETA), **(given.take("rope_scaling") or {})}
    full |= ropes.get("full_attention") or {}
    sliding = {"rope_theta": given.take("rope_local_base_freq", _SLIDING_THETA)}
    sliding |= ropes.get("sliding_attention") or {}
    if unread := ropes.keys() - {"full_attention", "sliding_attention"}:
        raise given.error(f"rope_parameters of {sorted(unread)}", "layers are full_attention or sliding_attention")
    near = parse_rope(sliding, given)
    if near["rope_scaling"] is not None:
        raise given.error("scaled rope_parameters of sliding_attention", "only those of full_attention are computed")
    return parse_rope(full, given) | {"sliding_rope_theta": near["rope_theta"]}


def write(config: ModelConfig) -> dict[str, Any]:
    """Fields of config.json beside those that all families share."""
    near = config.rope_theta if config.sliding_rope_theta is None else config.sliding_rope_theta
    return gemma2.write(config) | {
        "layer_types": write_layer_types(config),
        "rope_parameters": {
            "full_attention": rope_dictionary(config.rope_theta, config.rope_scaling),
            "sliding_attention": rope_dictionary(near, None),
        },
        "rope_local_base_freq": near,
    }


def tensors(config: ModelConfig) -> Mapping[str, StoredTensor]:
    """Where each parameter but the head is stored."""
    return DECODER | SANDWICH | QK_NORM


GEMMA3 = Family(
    name="gemma3_text",
    causal="Gemma3ForCausalLM",
    classifier="Gemma3TextForSequenceClassification",
    tensors=tensors,
    read=read,
    write=write,
)
