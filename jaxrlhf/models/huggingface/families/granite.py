"""Granite 3 and 4 (dense): Llama with four scaling factors."""

from typing import Any

from jaxrlhf.models.huggingface.families.family import DECODER, Family
from jaxrlhf.models.huggingface.families.fields import Fields


def _read(given: Fields) -> dict[str, Any]:
    given.only("attention_bias", False)
    given.only("mlp_bias", False)
    given.default(num_key_value_heads=given.take("num_attention_heads"))
    return {
        "embedding_multiplier": float(given.take("embedding_multiplier", 1.0)),
        "residual_multiplier": float(given.take("residual_multiplier", 1.0)),
        "logits_scaling": float(given.take("logits_scaling", 1.0)),
        "query_pre_attn_scalar": float(given.take("attention_multiplier", 1.0)) ** -2,
    }


GRANITE = Family("granite", "Granite", lambda config: DECODER, _read)
"""Granite (dense): factors of embeddings, scores, residual additions, and logits."""
