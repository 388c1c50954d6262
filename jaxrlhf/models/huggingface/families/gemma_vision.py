"""Gemma 3 with its tower: SigLIP over images of one size, means of squares of patches, bidirectional attention."""

import math
from collections.abc import Mapping
from typing import Any

from jaxrlhf.models.config import Vision
from jaxrlhf.models.huggingface.families.family import StoredTensor
from jaxrlhf.models.huggingface.families.fields import Fields, Link, written
from jaxrlhf.models.huggingface.families.sight import VisionFormat, in_tower

_LAYER = "tower.encoder.layers.{layer}."
_LINKS = (
    Link("hidden_size", "hidden_size", 768),
    Link("intermediate_size", "intermediate_size", 3072),
    Link("num_hidden_layers", "num_layers", 12),
    Link("num_attention_heads", "num_heads", 12),
    Link("patch_size", "patch_size", 16),
    Link("layer_norm_eps", "eps", 1e-6),
)
_TOKENS = (
    Link("image_token_index", "image_token", 262_144),
    Link("boi_token_index", "start_token", 255_999),
    Link("eoi_token_index", "end_token", 256_000),
)
_PREFIXES = {
    "model.": "language_model.model.",
    "lm_head.": "language_model.lm_head.",
    "vision.tower.": "vision_tower.",
    "vision.projector.": "multi_modal_projector.",
}
"""Prefixes of names as transformers writes them, by our prefixes."""


def _tensors(vision: Vision) -> dict[str, StoredTensor]:
    layers: dict[str, tuple[str, str, str]] = {}
    for ours, theirs in (("query", "q_proj"), ("key", "k_proj"), ("value", "v_proj")):
        layers[f"attention__{ours}"] = f"self_attn.{theirs}.weight", "DNH", "NH D"
        layers[f"attention__{ours}_bias"] = f"self_attn.{theirs}.bias", "NH", "NH"
    for ours, theirs in (("attention_norm", "layer_norm1"), ("mlp_norm", "layer_norm2")):
        layers |= {ours: (f"{theirs}.weight", "D", "D"), f"{ours}_bias": (f"{theirs}.bias", "D", "D")}
    layers |= {
        "attention__output": ("self_attn.out_proj.weight", "NHD", "D NH"),
        "attention__output_bias": ("self_attn.out_proj.bias", "D", "D"),
        "mlp__up": ("mlp.fc1.weight", "DF", "F D"),
        "mlp__up_bias": ("mlp.fc1.bias", "F", "F"),
        "mlp__down": ("mlp.fc2.weight", "FD", "D F"),
        "mlp__down_bias": ("mlp.fc2.bias", "D", "D"),
    }
    return {
        **in_tower(
            "tower.",
            patch=("embeddings.patch_embedding.weight", "CYXD", "D C Y X"),
            patch_bias=("embeddings.patch_embedding.bias", "D", "D"),
            positions=("embeddings.position_embedding.weight", "VD", "V D"),
            final_norm=("post_layernorm.weight", "D", "D"),
            final_norm_bias=("post_layernorm.bias", "D", "D"),
        ),
        **{f"layers.{path}": each for path, each in in_tower(_LAYER, **layers).items()},
        **in_tower(
            "projector.",
            merger__norm=("mm_soft_emb_norm.weight", "D", "D"),
            merger__projection=("mm_input_projection_weight", "DF", "D F"),
        ),
    }


def _read(given: Fields, text: Mapping[str, Any], whole: Mapping[str, Any]) -> Vision:
    given.only("hidden_act", "gelu_pytorch_tanh")
    given.only("num_channels", 3)
    given.take("vision_use_head")  # nothing reads the pooled output
    given.take("attention_dropout")
    size, shape = given.take("image_size", 224), given.linked(_LINKS)
    features = math.isqrt(whole.get("mm_tokens_per_image", 256))
    side = size // shape["patch_size"]
    if side % features:
        raise given.error(f"{side} x {side} patches and {features} x {features} features", "one must divide the other")
    return Vision(
        family="gemma3",
        **{ours: int(whole.get(theirs, default)) for theirs, ours, default, _ in _TOKENS},
        **shape,
        out_size=int(text.get("hidden_size", 2304)),
        merge=side // features,
        positions=side**2,
        rotates=False,
        merger="mean",
        both_ways=True,
    )


def _write(vision: Vision) -> dict[str, Any]:
    return {
        "model_type": "siglip_vision_model",
        "hidden_act": "gelu_pytorch_tanh",
        "image_size": math.isqrt(vision.positions) * vision.patch_size,
        "num_channels": 3,
        "vision_use_head": False,
        **written(vision, _LINKS),
    }


def _beside(vision: Vision) -> dict[str, Any]:
    return written(vision, _TOKENS) | {"mm_tokens_per_image": vision.positions // vision.merge**2}


GEMMA3_VISION = VisionFormat(
    "gemma3",
    "Gemma3ForConditionalGeneration",
    "gemma3_text",
    "gemma3_text",
    _PREFIXES,
    _tensors,
    _read,
    _write,
    _beside,
    modules={"model.": "model.language_model.", "vision.tower.": "model.vision_tower."},
    leaves_out=("vision.tower.head.",),
)
"""Gemma 3 (4B and larger): every image has the same number of features."""
