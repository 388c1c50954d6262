"""Granite 3 and 4 (dense): Llama with four scaling factors."""

from typing import Any

from jaxrlhf.models.config import ModelConfig
from jaxrlhf.models.huggingface.families.family import DECODER, Family
from jaxrlhf.models.huggingface.families.fields import Fields, Link, written

_FACTORS = tuple(
    Link(name, name, 1.0, float) for name in ("embedding_multiplier", "residual_multiplier", "logits_scaling")
)


def _read(given: Fields) -> dict[str, Any]:
    given.only("attention_bias", False)
    given.only("mlp_bias", False)
    given.default(num_key_value_heads=given.take("num_attention_heads"))
    return {
        **given.linked(_FACTORS),
        "query_pre_attn_scalar": float(given.take("attention_multiplier", 1.0)) ** -2,
    }


def _write(config: ModelConfig) -> dict[str, Any]:
    return {
        "attention_bias": False,
        "mlp_bias": False,
        **written(config, _FACTORS),
        "attention_multiplier": 1 / config.score_divisor,
    }


GRANITE = Family("granite", "Granite", lambda config: DECODER, _read, _write)
"""Granite (dense): factors of embeddings, scores, residual additions, and logits."""
