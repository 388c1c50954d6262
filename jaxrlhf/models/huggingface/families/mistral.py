"""Ministral 3: Mistral with stretched positions, by which queries grow."""

from typing import Any

from jaxrlhf.models.config import ModelConfig
from jaxrlhf.models.huggingface.families.family import DECODER, Family
from jaxrlhf.models.huggingface.families.fields import Fields
from jaxrlhf.models.huggingface.families.rope_fields import parse_rope, rope_dictionary


def _read(given: Fields) -> dict[str, Any]:
    given.default(num_key_value_heads=8, head_dim=128, rms_norm_eps=1e-5)
    rope = dict(given.take("rope_parameters") or {})
    rope.pop("max_position_embeddings", None)  # the model's, once more
    if not rope:
        raise given.error("no rope_parameters", "a ministral3 checkpoint says there how queries grow")
    return {"sliding_window": given.take("sliding_window"), **parse_rope(rope, given)}


def _write(config: ModelConfig) -> dict[str, Any]:
    return {
        "sliding_window": config.sliding_window,
        "rope_parameters": rope_dictionary(config.rope_theta, config.rope_scaling),
        "rope_theta": None,
        "rope_scaling": None,
    }


MINISTRAL3 = Family("ministral3", "Ministral3", lambda config: DECODER, _read, _write)
"""Ministral 3: YaRN, and queries that grow with the logarithm of their position."""
