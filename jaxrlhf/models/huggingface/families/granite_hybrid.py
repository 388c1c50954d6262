"""Granite 4: layers with a state space (Mamba-2) and layers with attention, with Granite's scaling factors."""

from typing import Any

from jaxrlhf.models.config import Experts, LinearAttention, ModelConfig
from jaxrlhf.models.huggingface.families.family import (
    LAYER,
    WITHOUT_MLP,
    Family,
    StoredTensor,
    fused_experts,
    gate_and_up,
    in_layers,
    of_both_kinds,
)
from jaxrlhf.models.huggingface.families.fields import Fields
from jaxrlhf.models.huggingface.families.granite import GRANITE
from jaxrlhf.models.huggingface.families.windows import read_layer_types

_KINDS = {"attention": False, "mamba": True, "full_attention": False, "linear_attention": True}
_MOST_BLOCKS = 8
"""Most blocks that the value heads of a group are split into, so that devices can divide them."""
_IN, _CONVOLUTION, _MIXTURE = LAYER + "mamba.in_proj.weight", LAYER + "mamba.conv1d.", LAYER + "block_sparse_moe."


def _state_space(given: Fields) -> LinearAttention:
    heads, groups = given.take("mamba_n_heads", 128), given.take("mamba_n_groups", 1)
    inner, width = int(given.take("mamba_expand", 2)) * given.need("hidden_size"), given.take("mamba_d_head", "auto")
    width = inner // heads if width in (None, "auto") else width
    if width * heads != inner or heads % groups:
        raise given.error(
            f"mamba_n_heads={heads}, mamba_d_head={width} and mamba_n_groups={groups}",
            f"expected mamba_n_heads * mamba_d_head = mamba_expand * hidden_size = {inner}, and mamba_n_groups that "
            "divides mamba_n_heads",
        )
    blocks = max(size for size in range(1, _MOST_BLOCKS + 1) if heads // groups % size == 0)
    return LinearAttention(
        key_heads=groups * blocks,
        value_heads=heads,
        key_dim=given.take("mamba_d_state", 256),
        value_dim=width,
        kernel=given.take("mamba_d_conv", 4),
        groups=groups,
    )


def _read(given: Fields) -> dict[str, Any]:
    given.only("mamba_conv_bias", True)
    given.only("mamba_proj_bias", False)
    given.only("normalization_function", "rmsnorm")
    given.only("hidden_act", "silu")
    given.only("time_step_limit", [0.0, float("inf")], [0.0, {"__float__": "Infinity"}])
    for name in ("mamba_chunk_size", "init_method"):
        given.take(name)  # about computation or initialization
    count = given.need("num_hidden_layers")
    given.default(layer_types=given.take("layers_block_type") or ["mamba"] * count)
    linear_layers, linear = read_layer_types(given, kinds=_KINDS), _state_space(given)
    rotates = given.take("position_embedding_type")
    if rotates not in (None, "nope", "rope"):
        raise given.error(f"position_embedding_type={rotates!r}", "supported are 'rope', 'nope' and null")
    shared, inner = given.take("shared_intermediate_size", 1024), given.take("intermediate_size")
    experts = given.take("num_local_experts", 8) or 0
    per_token, loss = given.take("num_experts_per_tok", 2), given.take("router_aux_loss_coef", 0.001)
    found: dict[str, Any] = {"intermediate_size": shared}
    if experts:
        found = {"experts": Experts(experts, per_token, inner, shared, loss_coefficient=float(loss or 0.0))}
    given.default(intermediate_size=shared)
    return {
        **GRANITE.read(given),
        **found,
        "linear": linear if any(linear_layers) else None,
        "linear_layers": linear_layers if any(linear_layers) else (),
        "rope_layers": () if rotates == "rope" else (False,) * count,
    }


def _mixing(linear: LinearAttention) -> dict[str, StoredTensor]:
    """Return the table of state-space layers: one tensor has gates, values, keys, queries and steps along its rows.

    The convolution has the values, keys and queries in the same order.
    """
    assert linear.groups is not None
    values, keys = linear.value_heads * linear.value_dim, linear.groups * linear.key_dim
    rows, channels = 2 * values + 2 * keys + linear.value_heads, values + 2 * keys
    table = {
        "linear_gate": StoredTensor(_IN, "DKGU", "KGU D", inside=("KGU", 0, rows)),
        "linear_value": StoredTensor(_IN, "DKGU", "KGU D", inside=("KGU", values, rows)),
        "linear_key": StoredTensor(_IN, "DKX", "KX D", inside=("KX", 2 * values, rows)),
        "linear_query": StoredTensor(_IN, "DKX", "KX D", inside=("KX", 2 * values + keys, rows)),
        "linear_decay": StoredTensor(_IN, "DKG", "KG D", inside=("KG", 2 * values + 2 * keys, rows)),
    }
    for name, letters, start in (("value", "KGU", 0), ("key", "KX", values), ("query", "KX", values + keys)):
        kernel, bias, inside = _CONVOLUTION + "weight", _CONVOLUTION + "bias", (letters, start, channels)
        table[f"convolved_{name}"] = StoredTensor(kernel, f"{letters}T", f"{letters} 1 T", inside=inside)
        table[f"convolved_{name}_bias"] = StoredTensor(bias, letters, letters, inside=inside)
    return {f"layers.attention.{name}": each for name, each in table.items()} | in_layers(
        attention__decay_rate=("mamba.A_log", "V", "V"),
        attention__decay_bias=("mamba.dt_bias", "V", "V"),
        attention__skip=("mamba.D", "V", "V"),
        attention__mixed_norm=("mamba.norm.weight", "VU", "VU"),
        attention__output=("mamba.out_proj.weight", "VUD", "D VU"),
    )


def _tensors(config: ModelConfig) -> dict[str, StoredTensor]:
    rest, mlp, inner = dict(WITHOUT_MLP), "layers.mlp.", config.intermediate_size
    if config.experts is not None:
        mlp, inner = "layers.mlp.shared.", config.experts.shared_intermediate_size
        both, down = "input_linear.weight", "output_linear.weight"
        rest |= fused_experts(_MIXTURE, config.experts.intermediate_size, both=both, down=down)
        rest["layers.mlp.router"] = StoredTensor(_MIXTURE + "router.layer.weight", "DE", "E D")
    rest |= gate_and_up(inner, name="shared_mlp.input_linear.weight", mlp=mlp)
    rest[f"{mlp}down"] = StoredTensor(LAYER + "shared_mlp.output_linear.weight", "FD", "D F")
    return rest if config.linear is None else of_both_kinds(config, rest, _mixing(config.linear))


GRANITE_HYBRID = Family("granitemoehybrid", "GraniteMoeHybrid", _tensors, _read)
"""Granite 4: with or without experts next to a shared MLP, with state spaces or only attention."""
