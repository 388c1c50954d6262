"""Qwen3-Next, Qwen3.5 and Qwen3.5-MoE (text): three layers with linear attention per layer with gated attention."""

from typing import Any

from jaxrlhf.models.config import Experts, LinearAttention, ModelConfig
from jaxrlhf.models.huggingface.families.family import (
    DECODER,
    LAYER,
    MTP_APART,
    QK_NORM,
    Family,
    StoredTensor,
    gated_mlp,
    in_layers,
    mixture,
    of_both_kinds,
)
from jaxrlhf.models.huggingface.families.fields import Fields, Link
from jaxrlhf.models.huggingface.families.qwen import EXPERTS
from jaxrlhf.models.huggingface.families.rope_fields import OF_IMAGES, read_rope
from jaxrlhf.models.huggingface.families.windows import LINEAR, read_layer_types

_LINEAR = LAYER + "linear_attn."
_ROTATED = 0.25
"""Default part of each head that is rotated."""
_EXPERTS = (*EXPERTS, Link("shared_expert_intermediate_size", "shared_intermediate_size"))


def _read(given: Fields) -> dict[str, Any]:
    """Read the fields that all three families share, without experts."""
    given.only("attention_bias", False)
    for name in ("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings", "mamba_ssm_dtype", "attn_output_gate"):
        given.take(name)  # for speculation, or implied by other fields
    given.default(head_dim=256, hidden_act="silu")
    given.only("hidden_act", "silu")
    interval = given.take("full_attention_interval") or 4
    linear = LinearAttention(
        key_heads=given.take("linear_num_key_heads", 16),
        value_heads=given.take("linear_num_value_heads", 32),
        key_dim=given.take("linear_key_head_dim", 128),
        value_dim=given.take("linear_value_head_dim", 128),
        kernel=given.take("linear_conv_kernel_dim", 4),
    )
    given.default(partial_rotary_factor=_ROTATED)
    return {
        "qk_norm": True,
        "unit_offset": True,
        "attention_gate": True,
        "linear": linear,
        "linear_layers": read_layer_types(given, every=interval, kinds=LINEAR),
        **read_rope(given, unread=OF_IMAGES),
    }


def _read_experts(given: Fields) -> dict[str, Any]:
    given.only("decoder_sparse_step", 1)
    given.only("mlp_only_layers", [])
    given.default(intermediate_size=given.need("moe_intermediate_size"))
    experts = given.linked(_EXPERTS)
    return {**_read(given), "experts": Experts(**experts, shared_gate=True)}


def _by_kind(
    config: ModelConfig, mlp: dict[str, StoredTensor], projections: dict[str, StoredTensor]
) -> dict[str, StoredTensor]:
    """Return a table of layers of both kinds, with the indices of both.

    Args:
      mlp: `DECODER` with the MLP that all layers have.
      projections: Table of the projections of linear attention's input.
    """
    linear = config.linear
    assert linear is not None
    keys, values = linear.key_heads * linear.key_dim, linear.value_heads * linear.value_dim
    conv, rows = _LINEAR + "conv1d.weight", 2 * keys + values
    mixing = projections | {
        **in_layers(
            attention__decay_rate=("linear_attn.A_log", "V", "V"),
            attention__decay_bias=("linear_attn.dt_bias", "V", "V"),
            attention__mixed_norm=("linear_attn.norm.weight", "U", "U"),
            attention__output=("linear_attn.out_proj.weight", "VUD", "D VU"),
        ),
        "layers.attention.convolved_query": StoredTensor(conv, "KXT", "KX 1 T", inside=("KX", 0, rows)),
        "layers.attention.convolved_key": StoredTensor(conv, "KXT", "KX 1 T", inside=("KX", keys, rows)),
        "layers.attention.convolved_value": StoredTensor(conv, "KGUT", "KGU 1 T", inside=("KGU", 2 * keys, rows)),
    }
    return of_both_kinds(config, mlp | QK_NORM, mixing)


_GATE = in_layers(mlp__shared_gate=("mlp.shared_expert_gate.weight", "DO", "O D"))
_MIXTURE = mixture() | gated_mlp("mlp.shared_expert", "mlp__shared") | _GATE


def _next_tensors(config: ModelConfig) -> dict[str, StoredTensor]:
    """Return the table of Qwen3-Next.

    One tensor has the queries, keys, values and gates of each key head side by side, another its rates and decays.
    """
    linear = config.linear
    assert linear is not None
    group, width = linear.value_heads // linear.key_heads, linear.key_dim
    values = group * linear.value_dim
    both, total = _LINEAR + "in_proj_qkvz.weight", 2 * width + 2 * values
    few = _LINEAR + "in_proj_ba.weight"
    heads = {
        "query": StoredTensor(both, "DKX", "KX D", inside=("X", 0, total)),
        "key": StoredTensor(both, "DKX", "KX D", inside=("X", width, total)),
        "value": StoredTensor(both, "DKGU", "KGU D", inside=("GU", 2 * width, total)),
        "gate": StoredTensor(both, "DKGU", "KGU D", inside=("GU", 2 * width + values, total)),
        "rate": StoredTensor(few, "DKG", "KG D", inside=("G", 0, 2 * group)),
        "decay": StoredTensor(few, "DKG", "KG D", inside=("G", group, 2 * group)),
    }
    return _by_kind(config, _MIXTURE, {f"layers.attention.linear_{name}": each for name, each in heads.items()})


def _projections(config: ModelConfig) -> dict[str, StoredTensor]:
    """Return the table of Qwen3.5's projections: queries, keys and values share a tensor, others have their own."""
    linear = config.linear
    assert linear is not None
    keys, values = linear.key_heads * linear.key_dim, linear.value_heads * linear.value_dim
    name, rows = _LINEAR + "in_proj_qkv.weight", 2 * keys + values
    return {
        "layers.attention.linear_query": StoredTensor(name, "DKX", "KX D", inside=("KX", 0, rows)),
        "layers.attention.linear_key": StoredTensor(name, "DKX", "KX D", inside=("KX", keys, rows)),
        "layers.attention.linear_value": StoredTensor(name, "DKGU", "KGU D", inside=("KGU", 2 * keys, rows)),
        **in_layers(
            attention__linear_gate=("linear_attn.in_proj_z.weight", "DKGU", "KGU D"),
            attention__linear_rate=("linear_attn.in_proj_b.weight", "DKG", "KG D"),
            attention__linear_decay=("linear_attn.in_proj_a.weight", "DKG", "KG D"),
        ),
    }


QWEN3_NEXT = Family("qwen3_next", "Qwen3Next", _next_tensors, _read_experts, mtp=MTP_APART)
"""Qwen3-Next: experts in every layer."""

QWEN3_5 = Family(
    "qwen3_5_text",
    "Qwen3_5",
    lambda config: _by_kind(config, DECODER, _projections(config)),
    _read,
    score_architecture="Qwen3_5Text",
    mtp=MTP_APART,
)
"""Qwen3.5 (dense, text): the layers of Qwen3-Next with a gated MLP."""

QWEN3_5_MOE = Family(
    "qwen3_5_moe_text",
    "Qwen3_5Moe",
    lambda config: _by_kind(config, _MIXTURE, _projections(config)),
    _read_experts,
    mtp=MTP_APART,
)
"""Qwen3.5-MoE (text): the layers of Qwen3-Next, with separate tensors for the projections."""
