"""Gemma 3n (text): several residual streams, embeddings of tokens for each layer, low-rank products next to attention,
MLPs in which only the largest gates count, and later layers that borrow keys and values."""

from typing import Any

from jaxrlhf.models.config import FullHeads, Streams
from jaxrlhf.models.huggingface.families.family import Family, StoredTensor, in_layers
from jaxrlhf.models.huggingface.families.fields import Fields
from jaxrlhf.models.huggingface.families.gemma import read_own_ropes
from jaxrlhf.models.huggingface.families.gemma4 import INPUTS, WITH_INPUTS, borrowers, by_stack, read_with_inputs
from jaxrlhf.models.huggingface.families.windows import read_layer_types

_SPARSE, _SHARE = 10, 0.95
"""Defaults for deep models: number of first layers that are sparse, and the sparsity of their MLPs."""


def _read(given: Fields) -> dict[str, Any]:
    given.only("altup_active_idx", 0)
    given.only("altup_correct_scale", True)
    for name in ("altup_coef_clip", "altup_lr_multiplier", "query_pre_attn_scalar"):
        given.take(name)  # for training, or unused
    shared = read_with_inputs(given)
    given.default(num_key_value_heads=2)
    count = given.need("num_hidden_layers")
    sparse = _SPARSE if count > _SPARSE else 0
    sparsity = given.take("activation_sparsity_pattern") or [_SHARE] * sparse + [0.0] * (count - sparse)
    if len(sparsity) != count:
        raise given.error(f"{len(sparsity)} numbers in activation_sparsity_pattern", f"num_hidden_layers is {count}")
    return {
        **shared,
        "intermediate_size": _one_width(given),
        "final_logit_softcapping": given.take("final_logit_softcapping", 30.0),
        "sliding_layers": read_layer_types(given, every=5),
        "full_heads": FullHeads(given.need("num_key_value_heads"), given.need("head_dim")),
        "borrowing_layers": given.take("num_kv_shared_layers", 15),
        "streams": Streams(given.take("altup_num_inputs", 4)),
        "laurel_rank": given.take("laurel_rank", 64),
        "sparsity": tuple(map(float, sparsity)) if any(sparsity) else (),
        **read_own_ropes(given),
    }


def _one_width(given: Fields) -> int:
    """Return the width of MLPs (F); files have a width for each layer.

    Raises:
      Refusal: Layers differ.
    """
    widths = given.need("intermediate_size")
    each = set(widths) if isinstance(widths, list) else {widths}
    if len(each) > 1:
        raise given.error(f"intermediate_size={widths}", "layers of different widths are not supported")
    return each.pop()


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
    score_architecture="Gemma3nText",
    unread=borrowers,
)
"""Gemma 3n (text)."""
