"""MiniMax-M2: experts by sigmoid scores in every layer, norms over all heads together."""

import re
from typing import Any

from jaxrlhf.models.config import ModelConfig
from jaxrlhf.models.huggingface.families.family import NORMS_ACROSS_HEADS, Family, in_layers
from jaxrlhf.models.huggingface.families.fields import Fields
from jaxrlhf.models.huggingface.families.llama import MIXTRAL_TENSORS, read_local_experts


def _read(given: Fields) -> dict[str, Any]:
    for name in ("use_mtp", "num_mtp_modules", "mtp_transformer_layers"):
        given.take(name)  # for speculation
    for name, computed in (
        ("router_jitter_noise", 0.0),
        ("scoring_func", "sigmoid"),
        ("use_routing_bias", True),
        ("use_qk_norm", True),
        ("qk_norm_type", "per_layer"),
        ("shared_intermediate_size", 0),
        ("hidden_act", "silu"),
    ):
        given.only(name, computed)
    if not all(given.take("attn_type_list") or [1]):
        raise given.error("attn_type_list with 0", "a minimax_m2 decoder has softmax attention in every layer")
    given.default(num_key_value_heads=8, head_dim=128, rope_theta=5_000_000.0)
    if rotated := given.take("rotary_dim"):
        given.default(partial_rotary_factor=rotated / given.need("head_dim"))
    experts = read_local_experts(given, count=256, per_token=8, scores="sigmoid", bias=True)
    return {"experts": experts, "qk_norm": True, "qk_norm_across_heads": True}


_TENSORS = (
    MIXTRAL_TENSORS
    | NORMS_ACROSS_HEADS
    | in_layers(mlp__router_bias=("block_sparse_moe.e_score_correction_bias", "E", "E"))
)

_MTP_MODULES = 3


def _of_mtp(config: ModelConfig) -> re.Pattern[str]:
    """Return the pattern of tensors of modules that predict further tokens."""
    behind = "|".join(str(config.num_layers + place) for place in range(_MTP_MODULES))
    return re.compile(rf"(mtp|model\.layers\.({behind}))\.")


MINIMAX_M2 = Family("minimax_m2", "MiniMaxM2", lambda config: _TENSORS, _read, unread=_of_mtp)
"""MiniMax-M2: Mixtral's tensors, routed by sigmoid scores and a bias; a part of each head is rotated."""
