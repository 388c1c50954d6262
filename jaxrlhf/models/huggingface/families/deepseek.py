"""DeepSeek-V2, V3 and V3.2: multi-head latent attention, and experts after a few dense layers."""

import warnings
from dataclasses import replace
from typing import Any

from jaxrlhf.models.config import Experts, Indexer, LatentAttention, ModelConfig
from jaxrlhf.models.huggingface.families.family import (
    DECODER,
    MTP_AFTER_LAYERS,
    ROUTER_BIAS,
    SHARED_EXPERTS,
    Family,
    StoredTensor,
    after_dense_layers,
    in_layers,
    mixture,
)
from jaxrlhf.models.huggingface.families.fields import Fields, Link, written

_NO_TENSORS = ("layers.attention.key", "layers.attention.value")
_LATENT = (
    Link("kv_lora_rank", "rank"),
    Link("qk_rope_head_dim", "rope_dim"),
    Link("v_head_dim", "value_dim"),
    Link("q_lora_rank", "query_rank", 1536),
)
_EXPERTS = (
    Link("n_routed_experts", "count"),
    Link("num_experts_per_tok", "per_token"),
    Link("moe_intermediate_size", "intermediate_size"),
    Link("routed_scaling_factor", "scaling", 1.0, float),
    Link("aux_loss_alpha", "loss_coefficient", 0.0, float),
)
_GROUPS = (
    Link("norm_topk_prob", "normalised", True, bool),
    Link("n_group", "groups", 1),
    Link("topk_group", "groups_per_token", 1),
)


def read_latent(given: Fields, *, interleaved: bool, dense_layers: int) -> dict[str, Any]:
    """Read the fields of `ModelConfig` that all versions set, except the router's; `dense_layers` is a default."""
    for name, computed in (("attention_bias", False), ("mlp_bias", False), ("moe_layer_freq", 1), ("ep_size", 1)):
        given.only(name, computed)
    given.only("hidden_act", "silu")
    for name in ("seq_aux", "num_nextn_predict_layers", "num_mtp_layers", "qk_head_dim"):
        given.take(name)  # for training or speculation, or implied by other fields
    given.default(num_key_value_heads=given.take("num_attention_heads"))
    latent = LatentAttention(**given.linked(_LATENT), interleaved=interleaved)
    return {
        "latent": latent,
        "head_dim": given.need("qk_nope_head_dim") + latent.rope_dim,
        "dense_layers": given.take("first_k_dense_replace", dense_layers),
    }


def read_experts(given: Fields, *links: Link, **router: Any) -> Experts:
    """Read routed and shared experts, by DeepSeek's field names; `links` are further fields of the router."""
    experts = given.linked((*_EXPERTS, *links))
    shared = experts["intermediate_size"] * given.need("n_shared_experts")
    return Experts(**experts, shared_intermediate_size=shared, **router)


def read_grouped_experts(given: Fields, **router: Any) -> Experts:
    """Read experts that are chosen within the best groups, ranked by the sum of their two best experts."""
    return read_experts(given, *_GROUPS, group_best=2, **router)


def latent_tensors(config: ModelConfig) -> dict[str, StoredTensor]:
    """Return the table of a model with latent attention, and experts after a few dense layers."""
    latent, experts = config.latent, config.experts
    assert latent is not None and experts is not None
    attention = in_layers(
        attention__latent=("self_attn.kv_a_proj_with_mqa.weight", "DC", "C D"),
        attention__latent_norm=("self_attn.kv_a_layernorm.weight", "C", "C"),
        attention__key_value=("self_attn.kv_b_proj.weight", "CNU", "NU C"),
        attention__output=("self_attn.o_proj.weight", "NUD", "D NU"),
        attention__query=("self_attn.q_proj.weight", "DNH", "NH D"),
    )
    if latent.query_rank is not None:
        attention |= in_layers(
            attention__query_down=("self_attn.q_a_proj.weight", "DC", "C D"),
            attention__query_norm=("self_attn.q_a_layernorm.weight", "C", "C"),
            attention__query=("self_attn.q_b_proj.weight", "CNH", "NH C"),
        )
    if latent.indexer is not None:
        attention |= in_layers(
            attention__index_query=("self_attn.indexer.wq_b.weight", "CNH", "NH C"),
            attention__index_key=("self_attn.indexer.wk.weight", "DH", "H D"),
            attention__index_weights=("self_attn.indexer.weights_proj.weight", "DN", "N D"),
            attention__index_key_norm=("self_attn.indexer.k_norm.weight", "H", "H"),
            attention__index_key_bias=("self_attn.indexer.k_norm.bias", "H", "H"),
        )
    shared = SHARED_EXPERTS | (ROUTER_BIAS if experts.bias else {})
    sparse = mixture() | attention | shared
    tensors = after_dense_layers(config, sparse, DECODER | attention)
    return {path: stored for path, stored in tensors.items() if path.removeprefix("dense_") not in _NO_TENSORS}


def _read_v2(given: Fields) -> dict[str, Any]:
    given.only("scoring_func", "softmax")
    given.only("topk_method", "greedy", "group_limited_greedy")
    given.only("norm_topk_prob", False)
    grouped = given.take("topk_method") == "group_limited_greedy"
    groups, chosen = given.take("n_group"), given.take("topk_group")
    router = {"groups": groups, "groups_per_token": chosen} if grouped else {}
    experts = read_experts(given, normalised=False, **router)
    return {"experts": experts, **read_latent(given, interleaved=True, dense_layers=0)}


def _write_v2(config: ModelConfig) -> dict[str, Any]:
    latent, experts = config.latent, config.experts
    assert latent is not None and experts is not None
    return {
        **written(experts, (*_EXPERTS, *_GROUPS)),
        **written(latent, _LATENT),
        "first_k_dense_replace": config.dense_layers,
        "n_shared_experts": experts.shared_intermediate_size // experts.intermediate_size,
        "scoring_func": experts.scores,
        "topk_method": "group_limited_greedy" if experts.groups > 1 else "greedy",
        "attention_bias": False,
        "head_dim": latent.rope_dim,
        "qk_nope_head_dim": config.head_dim - latent.rope_dim,
    }


DEEPSEEK_V2 = Family("deepseek_v2", "DeepseekV2", latent_tensors, _read_v2, _write_v2)
"""DeepSeek-V2: the best experts, or the best experts of the best groups."""


def _read_v3(given: Fields) -> dict[str, Any]:
    given.only("scoring_func", "sigmoid")
    given.only("topk_method", "noaux_tc")
    given.default(routed_scaling_factor=2.5, n_group=8, topk_group=4)
    experts = read_grouped_experts(given, scores="sigmoid", bias=True)
    interleaved = bool(given.take("rope_interleave", True))
    return {"experts": experts, **read_latent(given, interleaved=interleaved, dense_layers=3)}


DEEPSEEK_V3 = Family("deepseek_v3", "DeepseekV3", latent_tensors, _read_v3, mtp=MTP_AFTER_LAYERS)
"""DeepSeek-V3: experts by sigmoid scores and a bias, within the groups with the best pairs of experts."""


def _read_v32(given: Fields) -> dict[str, Any]:
    count, dense = given.need("num_hidden_layers"), given.take("first_k_dense_replace", 3)
    given.only("layer_types", ["indexed_attention"] * count)
    given.only("mlp_layer_types", ["dense"] * dense + ["sparse"] * (count - dense))
    read = _read_v3(given)
    index = Indexer(given.take("index_n_heads", 64), given.take("index_head_dim", 128), given.take("index_topk", 2048))
    if given.need("max_position_embeddings") > index.top:
        warnings.warn(
            "sparse attention of deepseek_v32 is computed as full attention: sequences of more than "
            f"index_topk={index.top} tokens get logits that differ from the checkpoint's, and cost more",
            RuntimeWarning,
            stacklevel=2,
        )
    return read | {"latent": replace(read["latent"], indexer=index)}


DEEPSEEK_V32 = Family("deepseek_v32", "DeepseekV32", latent_tensors, _read_v32, mtp=MTP_AFTER_LAYERS)
"""DeepSeek-V3.2: V3 with sparse attention. Its indexer is loaded and saved, but attention sees all tokens."""
