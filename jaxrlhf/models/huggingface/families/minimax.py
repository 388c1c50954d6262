"""MiniMax-M2: experts by sigmoid scores in every layer, norms over all heads together."""

from typing import Any

from jaxrlhf.models.config import Experts, ModelConfig
from jaxrlhf.models.huggingface.families.family import Family, StoredTensor, in_layers, mixture
from jaxrlhf.models.huggingface.families.fields import Fields


def _read(given: Fields) -> dict[str, Any]:
    for name in ("use_mtp", "num_mtp_modules", "mtp_transformer_layers"):
        given.take(name)  # of speculation
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
        raise given.error("attn_type_list with 0", "every layer of this minimax_m2 decoder has softmax attention")
    given.default(num_key_value_heads=8, head_dim=128, rope_theta=5_000_000.0)
    if rotated := given.take("rotary_dim"):
        given.default(partial_rotary_factor=rotated / given.need("head_dim"))
    experts = Experts(
        count=given.take("num_local_experts", 256),
        per_token=given.take("num_experts_per_tok", 8),
        intermediate_size=given.need("intermediate_size"),
        scores="sigmoid",
        bias=True,
        loss_coefficient=float(given.take("router_aux_loss_coef", 0.001)),
    )
    return {"experts": experts, "qk_norm": True, "qk_norm_across_heads": True}


def _write(config: ModelConfig) -> dict[str, Any]:
    experts = config.experts
    assert experts is not None
    return {
        "intermediate_size": experts.intermediate_size,
        "num_local_experts": experts.count,
        "num_experts_per_tok": experts.per_token,
        "router_aux_loss_coef": experts.loss_coefficient,
        "rotary_dim": config.rotary_dim,
    }


def _tensors(config: ModelConfig) -> dict[str, StoredTensor]:
    return mixture("block_sparse_moe", gate="w1", up="w3", down="w2") | in_layers(
        mlp__router_bias=("block_sparse_moe.e_score_correction_bias", "E", "E"),
        attention__query_norm=("self_attn.q_norm.weight", "NH", "NH"),
        attention__key_norm=("self_attn.k_norm.weight", "KH", "KH"),
    )


MINIMAX_M2 = Family("minimax_m2", "MiniMaxM2", _tensors, _read, _write, predicts_several=True)
"""MiniMax-M2: Mixtral's tensors, routed by sigmoid scores and a bias; a part of each head is rotated."""
