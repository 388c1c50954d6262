"""Ministral 3 and Mistral 4: YaRN, and queries that grow with their position; Mistral 4 has the layers of DeepSeek."""

from typing import Any

from jaxrlhf.models.config import ModelConfig
from jaxrlhf.models.huggingface.families.deepseek import latent_tensors, read_grouped_experts, read_latent
from jaxrlhf.models.huggingface.families.family import DECODER, LAYER, Family, StoredTensor, fused_experts
from jaxrlhf.models.huggingface.families.fields import Fields
from jaxrlhf.models.huggingface.families.rope_fields import parse_rope


def _read_rope(given: Fields, family: str) -> dict[str, Any]:
    rope = dict(given.take("rope_parameters") or {})
    rope.pop("max_position_embeddings", None)  # a copy of the model's field
    if not rope:
        raise given.error("no rope_parameters", f"a {family} checkpoint must define the scaling of queries there")
    return rope


def _read_ministral(given: Fields) -> dict[str, Any]:
    given.default(num_key_value_heads=8, head_dim=128, rms_norm_eps=1e-5)
    rope = _read_rope(given, "ministral3")
    return {"sliding_window": given.take("sliding_window"), **parse_rope(rope, given)}


MINISTRAL3 = Family("ministral3", "Ministral3", lambda config: DECODER, _read_ministral)
"""Ministral 3: YaRN, and queries that grow with the logarithm of their position."""


def _read_mistral4(given: Fields) -> dict[str, Any]:
    rope = _read_rope(given, "mistral4")
    rope.pop("partial_rotary_factor", None)  # follows from the widths of both parts of a head
    given.default(n_group=1, topk_group=1)
    interleaved = bool(given.take("rope_interleave", True))
    latent = read_latent(given, interleaved=interleaved, dense_layers=0)
    return {"experts": read_grouped_experts(given), **latent, **parse_rope(rope, given)}


def _mistral4_tensors(config: ModelConfig) -> dict[str, StoredTensor]:
    assert config.experts is not None
    inner, later = config.experts.intermediate_size, tuple(range(config.dense_layers, config.num_layers))
    return latent_tensors(config) | fused_experts(LAYER + "mlp.experts.", inner, layers=later)


MISTRAL4 = Family("mistral4", "Mistral4", _mistral4_tensors, _read_mistral4)
"""Mistral 4: latent attention whose queries grow, and experts by softmax within the groups with the best pairs."""
