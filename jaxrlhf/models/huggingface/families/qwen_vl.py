"""Qwen2.5-VL, Qwen3-VL and Qwen3.5 with their towers: squares of patches merged by an MLP, three-part positions."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from jaxrlhf.models.config import Sections, Vision
from jaxrlhf.models.huggingface.families.family import StoredTensor
from jaxrlhf.models.huggingface.families.fields import Fields, Link, written
from jaxrlhf.models.huggingface.families.sight import VisionFormat, in_tower, joined_heads

_BLOCK = "blocks.{layer}."
_OLD = {"model.": "model.", "vision.": "visual."}
_NEW = {"model.": "model.language_model.", "vision.": "model.visual."}
_LINKS = (
    Link("hidden_size", "hidden_size"),
    Link("intermediate_size", "intermediate_size"),
    Link("depth", "num_layers"),
    Link("num_heads", "num_heads"),
    Link("patch_size", "patch_size"),
    Link("temporal_patch_size", "frames", 2),
    Link("spatial_merge_size", "merge", 2),
    Link("out_hidden_size", "out_size"),
)
_ACTIVATIONS: dict[str, Any] = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}


def _merger(path: str, prefix: str, norm: str, inner: str, outer: str) -> dict[str, StoredTensor]:
    tensors = {"norm": (f"{norm}.weight", "D", "D"), "norm_bias": (f"{norm}.bias", "D", "D")}
    for name, theirs in (("inner", inner), ("outer", outer)):
        tensors |= {name: (f"{theirs}.weight", "DF", "F D"), f"{name}_bias": (f"{theirs}.bias", "F", "F")}
    return {f"{path}.{name}": each for name, each in in_tower(prefix, **tensors).items()}


def _in_blocks(**tensors: tuple[str, str, str]) -> dict[str, StoredTensor]:
    return {f"layers.{path}": each for path, each in in_tower(_BLOCK, **tensors).items()}


def _shared(vision: Vision) -> dict[str, StoredTensor]:
    """Return the table that all towers share: everything except the MLP and the mergers."""
    return {
        **in_tower("", patch=("patch_embed.proj.weight", "CTYXD", "D C T Y X")),
        **joined_heads(_BLOCK + "attn.qkv", vision.hidden_size),
        **_in_blocks(
            attention__output=("attn.proj.weight", "NHD", "D NH"),
            attention__output_bias=("attn.proj.bias", "D", "D"),
            attention_norm=("norm1.weight", "D", "D"),
            mlp_norm=("norm2.weight", "D", "D"),
        ),
    }


def _tensors_2_5(vision: Vision) -> dict[str, StoredTensor]:
    merger = _merger("merger", "merger.", "ln_q", "mlp.0", "mlp.2")
    del merger["merger.norm_bias"]
    mlp: dict[str, tuple[str, str, str]] = {}
    for name, dims, stored in (("gate", "DF", "F D"), ("up", "DF", "F D"), ("down", "FD", "D F")):
        mlp[f"mlp__{name}"] = f"mlp.{name}_proj.weight", dims, stored
        mlp[f"mlp__{name}_bias"] = f"mlp.{name}_proj.bias", dims[1], dims[1]
    return _shared(vision) | _in_blocks(**mlp) | merger


def _tensors_3(vision: Vision) -> dict[str, StoredTensor]:
    names = "norm", "linear_fc1", "linear_fc2"
    deepstack = _merger("deepstack", "deepstack_merger_list.{layer}.", *names) if vision.deepstack else {}
    return {
        **_shared(vision),
        **in_tower("", patch_bias=("patch_embed.proj.bias", "D", "D"), positions=("pos_embed.weight", "VD", "V D")),
        **_in_blocks(
            attention_norm_bias=("norm1.bias", "D", "D"),
            mlp_norm_bias=("norm2.bias", "D", "D"),
            mlp__up=("mlp.linear_fc1.weight", "DF", "F D"),
            mlp__up_bias=("mlp.linear_fc1.bias", "F", "F"),
            mlp__down=("mlp.linear_fc2.weight", "FD", "D F"),
            mlp__down_bias=("mlp.linear_fc2.bias", "D", "D"),
        ),
        **_merger("merger", "merger.", *names),
        **deepstack,
    }


def _read(given: Fields, text: Mapping[str, Any], whole: Mapping[str, Any], *, family: str) -> Vision:
    """Read the fields that all towers share."""
    rope = given.take("rope_parameters") or {}
    if rope.get("rope_theta", 10_000.0) != 10_000.0 or rope.get("rope_type", "axial") != "axial":
        raise given.error(f"rope_parameters={rope}", "supported are axial positions with rope_theta=10000")
    given.only("in_channels", 3)
    given.take("in_chans")
    given.take("tokens_per_second")  # for videos
    given.default(patch_size=given.take("spatial_patch_size"))
    turned = text.get("rope_parameters") or text.get("rope_scaling") or {}
    pairs = turned.get("mrope_section")
    if pairs is None:
        raise given.error(
            "no mrope_section in text_config",
            "expected the number of pairs for each of the three parts of a position",
        )
    return Vision(
        family=family,
        image_token=int(whole["image_token_id"]),
        start_token=whole.get("vision_start_token_id"),
        end_token=whole.get("vision_end_token_id"),
        video_token=whole.get("video_token_id"),
        **given.linked(_LINKS),
        sections=Sections(tuple(pairs), interleaved=family != "qwen2_5_vl"),
    )


def _read_2_5(given: Fields, text: Mapping[str, Any], whole: Mapping[str, Any]) -> Vision:
    given.only("hidden_act", "silu")
    vision = _read(given, text, whole, family="qwen2_5_vl")
    window, side = given.take("window_size", 112), vision.merge * vision.patch_size
    full = tuple(given.take("fullatt_block_indexes", (7, 15, 23, 31)))
    return replace(
        vision, norm="rms", gated=True, activation="silu", patch_bias=False, window=window // side, full_layers=full
    )


def _read_3(given: Fields, text: Mapping[str, Any], whole: Mapping[str, Any], *, family: str) -> Vision:
    given.only("hidden_act", "gelu_pytorch_tanh", "silu", "gelu")
    vision = _read(given, text, whole, family=family)
    return replace(
        vision,
        activation=_ACTIVATIONS[given.take("hidden_act") or "gelu_pytorch_tanh"],
        positions=given.take("num_position_embeddings", 2304),
        deepstack=tuple(given.take("deepstack_visual_indexes") or ()),
    )


def _write(vision: Vision) -> dict[str, Any]:
    assert vision.window is not None
    return {
        "model_type": "qwen2_5_vl_vision",
        **written(vision, _LINKS),
        "in_channels": 3,
        "hidden_act": "silu",
        "window_size": vision.window * vision.merge * vision.patch_size,
        "fullatt_block_indexes": list(vision.full_layers),
    }


QWEN2_5_VL = VisionFormat(
    "qwen2_5_vl",
    "Qwen2_5_VLForConditionalGeneration",
    "qwen2",
    "qwen2_5_vl_text",
    _OLD,
    _tensors_2_5,
    _read_2_5,
    _write,
)
"""Qwen2.5-VL: patches see only their window in most layers."""


def _third(name: str, architecture: str, text: str, text_type: str) -> VisionFormat:
    read = partial(_read_3, family=name)
    return VisionFormat(name, f"{architecture}ForConditionalGeneration", text, text_type, _NEW, _tensors_3, read)


QWEN3_VL = _third("qwen3_vl", "Qwen3VL", "qwen3", "qwen3_vl_text")
"""Qwen3-VL: features of several layers of the tower are added after the decoder's first layers (DeepStack)."""

QWEN3_VL_MOE = _third("qwen3_vl_moe", "Qwen3VLMoe", "qwen3_moe", "qwen3_vl_moe_text")
"""Qwen3-VL with experts."""

QWEN3_5_VISION = _third("qwen3_5", "Qwen3_5", "qwen3_5_text", "qwen3_5_text")
"""Qwen3.5: the tower of Qwen3-VL without DeepStack."""

QWEN3_5_MOE_VISION = _third("qwen3_5_moe", "Qwen3_5Moe", "qwen3_5_moe_text", "qwen3_5_moe_text")
"""Qwen3.5 with experts."""
