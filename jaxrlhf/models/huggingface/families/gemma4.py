"""Gemma 4 (text): layers without a window have other head sizes, later layers borrow keys and values of earlier layers,
and every layer has its own embedding of the token."""

import re
from typing import Any

import jax

from jaxrlhf.models.config import LENDERS, Experts, FullHeads, LayerInputs, ModelConfig
from jaxrlhf.models.huggingface.families.family import (
    LAYER,
    QK_NORM,
    Family,
    StoredTensor,
    fused_experts,
    gated_mlp,
    in_layers,
)
from jaxrlhf.models.huggingface.families.fields import Fields
from jaxrlhf.models.huggingface.families.gemma import FULL_THETA, SANDWICHED, SLIDING_THETA, read_gemma
from jaxrlhf.models.huggingface.families.rope_fields import read_two_ropes
from jaxrlhf.models.huggingface.families.windows import read_layer_types
from jaxrlhf.models.parameters import declare, path_name


def read_with_inputs(given: Fields) -> dict[str, Any]:
    """Read the fields of models whose layers have their own token embeddings as inputs."""
    width, rows = given.take("hidden_size_per_layer_input", 256), given.take("vocab_size_per_layer_input", 262_144)
    return {
        **read_gemma(given),
        "query_pre_attn_scalar": 1.0,
        "qk_norm": True,
        "value_norm": True,
        "sliding_window": given.take("sliding_window", 512),
        "layer_inputs": LayerInputs(width, rows) if width else None,
    }


def _read(given: Fields) -> dict[str, Any]:
    # "vision" is about tokens of an image, which then see each other; text is causal with either value.
    given.only("use_bidirectional_attention", None, "vision")
    given.default(num_key_value_heads=4)
    given.default(rope_parameters={"full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25}})
    layers = (*read_layer_types(given, every=6)[:-1], False)  # the last layer never has a window
    inner, borrowing = given.need("intermediate_size"), given.take("num_kv_shared_layers") or 0
    double = bool(given.take("use_double_wide_mlp", False)) and borrowing > 0
    return {
        **read_with_inputs(given),
        "experts": _read_experts(given),
        "layer_scale": True,
        "final_logit_softcapping": given.take("final_logit_softcapping"),
        "sliding_layers": layers,
        "full_heads": _read_full_heads(given, layers),
        "borrowing_layers": borrowing,
        "borrowing_intermediate_size": 2 * inner if double else None,
        **read_two_ropes(given, full_theta=FULL_THETA, sliding_theta=SLIDING_THETA),
    }


def _read_experts(given: Fields) -> Experts | None:
    """Read the experts that run next to the MLP; None if there are none."""
    count, chosen, inner = (given.take(name) for name in ("num_experts", "top_k_experts", "moe_intermediate_size"))
    if not given.take("enable_moe_block", False):
        return None
    if None in (count, chosen, inner):
        raise given.error("enable_moe_block=True", "num_experts, top_k_experts or moe_intermediate_size is missing")
    shared = given.need("intermediate_size")
    return Experts(count, chosen, inner, shared, apart=True, activation="gelu_tanh")


def _read_full_heads(given: Fields, layers: tuple[bool, ...]) -> FullHeads:
    """Read the heads of layers without a window: from separate fields, or from `per_layer_config` (transformers 5).

    Raises:
      Refusal: Layers without a window differ from each other, or `per_layer_config` has other layers or fields.
    """
    same, kv_heads = bool(given.take("attention_k_eq_v", False)), given.need("num_key_value_heads")
    head_dim, own_heads = given.take("global_head_dim", 512), given.take("num_global_key_value_heads")
    full = {"head_dim": head_dim, "num_key_value_heads": own_heads if same and own_heads else kv_heads}
    by_layer = given.take("per_layer_config")
    if by_layer is not None:
        places = [index for index, slides in enumerate(layers) if not slides]
        each = [by_layer.get(str(place), {}) for place in places]
        alike = all(other == each[0] for other in each)
        if not alike or by_layer.keys() - set(map(str, places)) or each[0].keys() - set(full):
            raise given.error(
                f"per_layer_config={by_layer!r}", "supported are head_dim and num_key_value_heads of full_attention"
            )
        full = {"head_dim": given.need("head_dim"), "num_key_value_heads": kv_heads} | each[0]
    return FullHeads(full["num_key_value_heads"], full["head_dim"], values_are_keys=same)


WITH_INPUTS = (
    SANDWICHED
    | QK_NORM
    | in_layers(
        scale=("layer_scalar", "O", "O"),
        layer_input__narrow=("per_layer_input_gate.weight", "DP", "P D"),
        layer_input__widen=("per_layer_projection.weight", "PD", "D P"),
        layer_input__norm=("post_per_layer_input_norm.weight", "D", "D"),
    )
)
INPUTS = {
    "layer_inputs.embed": StoredTensor("model.embed_tokens_per_layer.weight", "VLP", "V LP"),
    "layer_inputs.projection": StoredTensor("model.per_layer_model_projection.weight", "DLP", "LP D"),
    "layer_inputs.norm": StoredTensor("model.per_layer_projection_norm.weight", "P", "P"),
}


def by_stack(config: ModelConfig, table: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Return a table in which each stack of layers has the parameters that the stack declares."""
    declared = {path_name(path) for path, _ in jax.tree.leaves_with_path(declare(config, "lm"))}
    found = {path: each for path, each in table.items() if not path.startswith("layers.")}
    stack_of = config.pattern.stack_of()
    for stack in dict.fromkeys(stack_of):
        places = tuple(index for index, other in enumerate(stack_of) if other == stack)
        for path, each in table.items():
            own = path.replace("layers", stack, 1)
            if path.startswith("layers.") and own in declared:
                found[own] = each._replace(layers=places)
    return found


_BESIDE_EXPERTS = gated_mlp("mlp", "mlp__shared") | in_layers(
    mlp__router=("router.proj.weight", "DE", "E D"),
    mlp__router_scale=("router.scale", "D", "D"),
    mlp__expert_scale=("router.per_expert_scale", "E", "E"),
    mlp__experts_norm=("pre_feedforward_layernorm_2.weight", "D", "D"),
    mlp__experts_output_norm=("post_feedforward_layernorm_2.weight", "D", "D"),
    mlp__shared_output_norm=("post_feedforward_layernorm_1.weight", "D", "D"),
)


def _tensors(config: ModelConfig) -> dict[str, StoredTensor]:
    table = WITH_INPUTS if config.layer_inputs is None else WITH_INPUTS | INPUTS
    if config.experts is not None:
        inside = fused_experts(LAYER + "experts.", config.experts.intermediate_size)
        table = table | _BESIDE_EXPERTS | inside
    return by_stack(config, table)


def borrowers(config: ModelConfig) -> re.Pattern[str] | None:
    """Return a pattern of unused tensors: keys and values of layers that borrow them, in published files."""
    places = [str(index) for index, stack in enumerate(config.pattern.stack_of()) if stack in LENDERS]
    if not places:
        return None
    return re.compile(rf"model\.layers\.({'|'.join(places)})\.self_attn\.(k_proj|v_proj|k_norm|v_norm)\.")


GEMMA4 = Family(
    "gemma4_text",
    "Gemma4",
    _tensors,
    _read,
    score_architecture="Gemma4Text",
    unread=borrowers,
)
"""Gemma 4 (text)."""
