"""Gemma 3 with its tower: SigLIP over images of one size, means of squares of patches, bidirectional attention."""

import math
from collections.abc import Mapping
from typing import Any

from jaxrlhf.models.config import Vision
from jaxrlhf.models.huggingface.families.family import StoredTensor
from jaxrlhf.models.huggingface.families.fields import Fields
from jaxrlhf.models.huggingface.families.sight import VisionFormat, in_tower

_LAYER = "tower.encoder.layers.{layer}."
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
    size, patch = given.take("image_size", 224), given.take("patch_size", 16)
    features = math.isqrt(whole.get("mm_tokens_per_image", 256))
    side = size // patch
    if side % features:
        raise given.error(f"{side} x {side} patches and {features} x {features} features", "one must divide the other")
    return Vision(
        family="gemma3",
        image_token=int(whole.get("image_token_index", 262_144)),
        start_token=int(whole.get("boi_token_index", 255_999)),
        end_token=int(whole.get("eoi_token_index", 256_000)),
        hidden_size=given.take("hidden_size", 768),
        intermediate_size=given.take("intermediate_size", 3072),
        num_layers=given.take("num_hidden_layers", 12),
        num_heads=given.take("num_attention_heads", 12),
        patch_size=patch,
        out_size=int(text.get("hidden_size", 2304)),
        merge=side // features,
        eps=given.take("layer_norm_eps", 1e-6),
        positions=side**2,
        rotates=False,
        merger="mean",
        both_ways=True,
    )


GEMMA3_VISION = VisionFormat(
    "gemma3",
    "Gemma3ForConditionalGeneration",
    "gemma3_text",
    "gemma3_text",
    _PREFIXES,
    _tensors,
    _read,
    modules={"model.": "model.language_model.", "vision.tower.": "model.vision_tower."},
    leaves_out=("vision.tower.head.",),
)
"""Gemma 3 (4B and larger): every image has the same number of features."""
