"""Gemma 3n (text): several residual streams, embeddings of tokens for each layer, narrow products beside attention,
MLPs of which the largest gates alone count, and later layers that borrow keys and values."""

from typing import Any

from jaxrlhf.models.config import FullHeads, LayerInputs, ModelConfig, Streams
from jaxrlhf.models.huggingface.families.family import Family, StoredTensor, in_layers
from jaxrlhf.models.huggingface.families.fields import Fields
from jaxrlhf.models.huggingface.families.gemma4 import INPUTS, WITH_INPUTS, borrowers, by_stack
from jaxrlhf.models.huggingface.families.rope_fields import read_two_ropes, write_two_ropes
from jaxrlhf.models.huggingface.families.windows import read_layer_types, write_layer_types

_FULL_THETA, _SLIDING_THETA = 1_000_000.0, 10_000.0
_PERIOD, _SPARSE, _SHARE = 5, 10, 0.95
"""Layers of which the last has no window; first layers of deep models that are sparse, and how much: where the file
does not say."""


def _read(given: Fields) -> dict[str, Any]:
    given.only("attention_bias", False)
    given.only("altup_active_idx", 0)
    given.only("altup_correct_scale", True)
    for name in ("altup_coef_clip", "altup_lr_multiplier", "query_pre_attn_scalar"):
        given.take(name)  # of training, or in files and read by nobody
    given.only("hidden_activation", "gelu_pytorch_tanh")
    given.default(head_dim=256, num_key_value_heads=2)
    count = given.need("num_hidden_layers")
    layers = read_layer_types(given) or tuple((index + 1) % _PERIOD != 0 for index in range(count))
    sparse = _SPARSE if count > _SPARSE else 0
    sparsity = given.take("activation_sparsity_pattern") or [_SHARE] * sparse + [0.0] * (count - sparse)
    if len(sparsity) != count:
        raise given.error(f"{len(sparsity)} numbers in activation_sparsity_pattern", f"num_hidden_layers is {count}")
    ropes = read_two_ropes(
        given,
        full_theta=given.take("rope_theta", _FULL_THETA),
        sliding_theta=given.take("rope_local_base_freq", _SLIDING_THETA),
    )
    return {
        "intermediate_size": _one_width(given),
        "activation": "gelu_tanh",
        "norms": "sandwich",
        "scale_embeddings": True,
        "tie_embeddings": given.take("tie_word_embeddings", True),
        "query_pre_attn_scalar": 1.0,
        "qk_norm": True,
        "value_norm": True,
        "final_logit_softcapping": given.take("final_logit_softcapping", 30.0),
        "sliding_window": given.take("sliding_window", 512),
        "sliding_layers": layers,
        "full_heads": FullHeads(given.need("num_key_value_heads"), given.need("head_dim")),
        "borrowing_layers": given.take("num_kv_shared_layers", 15),
        "layer_inputs": LayerInputs(
            given.take("hidden_size_per_layer_input", 256), given.take("vocab_size_per_layer_input", 262_144)
        ),
        "streams": Streams(given.take("altup_num_inputs", 4)),
        "laurel_rank": given.take("laurel_rank", 64),
        "sparsity": tuple(map(float, sparsity)) if any(sparsity) else (),
        **ropes,
    }


def _one_width(given: Fields) -> int:
    """F, which files have for each layer.

    Raises:
      Refusal: Layers differ.
    """
    widths = given.need("intermediate_size")
    each = set(widths) if isinstance(widths, list) else {widths}
    if len(each) > 1:
        raise given.error(f"intermediate_size={widths}", "computed are layers of one width")
    return each.pop()


def _write(config: ModelConfig) -> dict[str, Any]:
    inputs, streams, count = config.layer_inputs, config.streams, config.num_layers
    assert inputs is not None and streams is not None
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "activation_sparsity_pattern": list(config.sparsity or (0.0,) * count),
        "altup_active_idx": 0,
        "altup_correct_scale": True,
        "altup_num_inputs": streams.count,
        "final_logit_softcapping": config.final_logit_softcapping,
        "hidden_size_per_layer_input": inputs.width,
        "intermediate_size": [config.intermediate_size] * count,
        "laurel_rank": config.laurel_rank,
        "layer_types": write_layer_types(config),
        "num_kv_shared_layers": config.borrowing_layers,
        "sliding_window": config.sliding_window,
        "vocab_size_per_layer_input": inputs.vocab_size,
        "rope_theta": config.rope_theta,
        "rope_scaling": None,
        **write_two_ropes(config),
    }


_TABLE = (
    WITH_INPUTS
    | INPUTS
    | in_layers(
        laurel__narrow=("laurel.linear_left.weight", "DR", "R D"),
        laurel__widen=("laurel.linear_right.weight", "RD", "D R"),
        laurel__norm=("laurel.post_laurel_norm.weight", "D", "D"),
        streams__router=("altup.modality_router.weight", "DA", "A D"),
        streams__router_norm=("altup.router_norm.weight", "D", "D"),
        streams__predict=("altup.prediction_coefs.weight", "AB", "B A"),
        streams__correct=("altup.correction_coefs.weight", "AB", "B A"),
        streams__scale=("altup.correct_output_scale", "D", "D"),
    )
    | {
        f"streams.{ours}": StoredTensor(f"model.{theirs}.{{layer}}.weight", "DE", "E D")
        for ours, theirs in (("spread", "altup_projections"), ("gather", "altup_unembed_projections"))
    }
)

GEMMA3N = Family(
    "gemma3n_text",
    "Gemma3n",
    lambda config: by_stack(config, _TABLE),
    _read,
    _write,
    score_architecture="Gemma3nText",
    unread=borrowers,
)
"""Gemma 3n (text)."""
