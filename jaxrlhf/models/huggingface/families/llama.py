"""Llama, Mistral and Mixtral, Phi-3."""

from typing import Any

from jaxrlhf.models.config import Experts, ModelConfig
from jaxrlhf.models.huggingface.families.family import DECODER, LAYER, Family, StoredTensor, gate_and_up, mixture
from jaxrlhf.models.huggingface.families.fields import Fields


def _read_llama(given: Fields) -> dict[str, Any]:
    given.only("attention_bias", False)
    given.only("mlp_bias", False)
    given.default(num_key_value_heads=given.take("num_attention_heads"))
    return {}


LLAMA = Family(
    "llama", "Llama", lambda config: DECODER, _read_llama, lambda config: {"attention_bias": False, "mlp_bias": False}
)
"""Llama 2 and 3.x: no biases, rotary frequencies scaled from 3.1 on."""


def _read_mistral(given: Fields) -> dict[str, Any]:
    given.default(num_key_value_heads=8)
    return {"sliding_window": given.take("sliding_window", 4096)}


MISTRAL = Family("mistral", "Mistral", lambda config: DECODER, _read_mistral)
"""Mistral: every layer has a window, unless the file says null."""


def read_local_experts(given: Fields, *, count: int, per_token: int, **others: Any) -> Experts:
    """Read routed experts by Mixtral's field names; `count` and `per_token` are defaults."""
    return Experts(
        count=given.take("num_local_experts", count),
        per_token=given.take("num_experts_per_tok", per_token),
        intermediate_size=given.need("intermediate_size"),
        loss_coefficient=float(given.take("router_aux_loss_coef", 0.001)),
        **others,
    )


def _read_mixtral(given: Fields) -> dict[str, Any]:
    given.only("hidden_act", "silu")
    given.only("router_jitter_noise", 0.0)
    given.default(num_key_value_heads=8, rms_norm_eps=1e-5, rope_theta=1e6)
    experts = read_local_experts(given, count=8, per_token=2)
    return {"experts": experts, "sliding_window": given.take("sliding_window")}


MIXTRAL_TENSORS = mixture("block_sparse_moe", gate="w1", up="w3", down="w2")

MIXTRAL = Family("mixtral", "Mixtral", lambda config: MIXTRAL_TENSORS, _read_mixtral)
"""Mixtral: Mistral with a mixture of experts in every layer; the weights of a token's experts sum to 1."""


def _read_phi3(given: Fields) -> dict[str, Any]:
    for name in ("attention_bias", "mlp_bias", "lm_head_bias"):
        given.only(name, False)
    for name in ("full_attn_mod", "interpolate_factor"):
        given.only(name, 1)
    given.default(
        rms_norm_eps=1e-5,
        num_key_value_heads=given.take("num_attention_heads"),
        original_max_position_embeddings=4096,
    )
    return {"sliding_window": given.take("sliding_window")}


def _phi3_tensors(config: ModelConfig) -> dict[str, StoredTensor]:
    qkv = LAYER + "self_attn.qkv_proj.weight"
    heads, kv_heads = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    rows = heads + 2 * kv_heads
    return (
        DECODER
        | gate_and_up(config.intermediate_size)
        | {
            "layers.attention.query": StoredTensor(qkv, "DNH", "NH D", inside=("NH", 0, rows)),
            "layers.attention.key": StoredTensor(qkv, "DKH", "KH D", inside=("KH", heads, rows)),
            "layers.attention.value": StoredTensor(qkv, "DKH", "KH D", inside=("KH", heads + kv_heads, rows)),
        }
    )


PHI3 = Family("phi3", "Phi3", _phi3_tensors, _read_phi3)
"""Phi-3, 3.5 and 4: q, k and v are in one tensor, gate and up in another; part of each head is rotated."""
