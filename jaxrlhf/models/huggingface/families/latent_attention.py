"""What DeepSeek-V2 and V3 share: latent attention, and experts after a few first layers without."""

from collections.abc import Mapping
from typing import Any

from jaxrlhf.models.config import LatentAttention, ModelConfig
from jaxrlhf.models.huggingface.families.family import DECODER, LAYER, StoredTensor
from jaxrlhf.models.huggingface.families.fields import Fields
from jaxrlhf.models.huggingface.families.mixture import mixture

_OWN = LAYER + "self_attn."
_APART = ("layers.attention.key", "layers.attention.value")


def read_latent(given: Fields, *, interleaved: bool, dense_layers: int) -> dict[str, Any]:
    """What `ModelConfig` is beside the router's fields and those that all families share.

    Args:
      dense_layers: Default.
    """
    for name, computed in (("attention_bias", False), ("mlp_bias", False), ("moe_layer_freq", 1), ("ep_size", 1)):
        given.only(name, computed)
    given.only("hidden_act", "silu")
    for name in ("seq_aux", "num_nextn_predict_layers", "num_mtp_layers", "qk_head_dim"):
        given.take(name)  # of training, of speculation, or said by others
    given.default(num_key_value_heads=given.take("num_attention_heads"))
    latent = LatentAttention(
        rank=given.need("kv_lora_rank"),
        rope_dim=given.need("qk_rope_head_dim"),
        value_dim=given.need("v_head_dim"),
        query_rank=given.take("q_lora_rank", 1536),
        interleaved=interleaved,
    )
    return {
        "latent": latent,
        "head_dim": given.need("qk_nope_head_dim") + latent.rope_dim,
        "dense_layers": given.take("first_k_dense_replace", dense_layers),
    }


def write_latent(config: ModelConfig) -> dict[str, Any]:
    """The inverse, and fields of experts that both have."""
    latent, experts = config.latent, config.experts
    assert latent is not None and experts is not None
    return {
        "attention_bias": False,
        "head_dim": latent.rope_dim,
        "kv_lora_rank": latent.rank,
        "q_lora_rank": latent.query_rank,
        "qk_nope_head_dim": config.head_dim - latent.rope_dim,
        "qk_rope_head_dim": latent.rope_dim,
        "v_head_dim": latent.value_dim,
        "first_k_dense_replace": config.dense_layers,
        "n_routed_experts": experts.count,
        "n_shared_experts": experts.shared_intermediate_size // experts.intermediate_size,
        "num_experts_per_tok": experts.per_token,
        "moe_intermediate_size": experts.intermediate_size,
        "n_group": experts.groups,
        "topk_group": experts.groups_per_token,
        "norm_topk_prob": experts.normalised,
        "routed_scaling_factor": experts.scaling,
        "scoring_func": experts.scores,
        "aux_loss_alpha": experts.loss_coefficient,
    }


def tensors(config: ModelConfig) -> Mapping[str, StoredTensor]:
    """Where each parameter but the head is stored."""
    latent, experts = config.latent, config.experts
    assert latent is not None and experts is not None
    attention = {
        "layers.attention.latent": StoredTensor(_OWN + "kv_a_proj_with_mqa.weight", "DC", "C D"),
        "layers.attention.latent_norm": StoredTensor(_OWN + "kv_a_layernorm.weight", "C", "C"),
        "layers.attention.key_value": StoredTensor(_OWN + "kv_b_proj.weight", "CNU", "NU C"),
        "layers.attention.output": StoredTensor(_OWN + "o_proj.weight", "NUD", "D NU"),
        "layers.attention.query": StoredTensor(_OWN + "q_proj.weight", "DNH", "NH D"),
    }
    if latent.query_rank is not None:
        attention |= {
            "layers.attention.query_down": StoredTensor(_OWN + "q_a_proj.weight", "DC", "C D"),
            "layers.attention.query_norm": StoredTensor(_OWN + "q_a_layernorm.weight", "C", "C"),
            "layers.attention.query": StoredTensor(_OWN + "q_b_proj.weight", "CNH", "NH C"),
        }
    shared = {
        f"layers.mlp.shared.{name}": StoredTensor(f"{LAYER}mlp.shared_experts.{name}_proj.weight", dims, stored)
        for name, dims, stored in (("gate", "DF", "F D"), ("up", "DF", "F D"), ("down", "FD", "D F"))
    }
    if experts.bias:
        shared["layers.mlp.router_bias"] = StoredTensor(LAYER + "mlp.gate.e_score_correction_bias", "E", "E")
    sparse = mixture("mlp", gate="gate_proj", up="up_proj", down="down_proj") | attention | shared
    moved = {path: stored._replace(layer=config.dense_layers) for path, stored in sparse.items() if path not in _APART}
    first = {f"dense_{path}": stored for path, stored in (DECODER | attention).items() if path.startswith("layers.")}
    return moved | {path: stored for path, stored in first.items() if path.removeprefix("dense_") not in _APART}
