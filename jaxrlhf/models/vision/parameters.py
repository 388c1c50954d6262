"""Parameters of a vision tower."""

import math
from typing import Any

from jaxrlhf.models.config import Vision
from jaxrlhf.models.config.param import Param
from jaxrlhf.sharding.rules import Dim


def declare_tower(vision: Vision) -> dict[str, Any]:
    """Declare a vision tower. Its layers are a separate stack, which pipeline stages do not divide."""
    width, inner, count = vision.hidden_size, vision.intermediate_size, (vision.num_layers,)
    embed, heads, wide = ("embed", width), ("heads", vision.num_heads), ("mlp", inner)

    def weight(before: tuple[int, ...], shape: tuple[int, ...], *dims: Dim, inputs: int = 1) -> Param:
        stack = ("tower_layers",) * len(before)
        return Param((*before, *shape), (*stack, *dims), fan_in=math.prod(shape[:inputs]))

    def vector(before: tuple[int, ...], shape: tuple[int, ...], *dims: Dim, ones: bool = False) -> Param:
        return Param((*before, *shape), (*("tower_layers",) * len(before), *dims), "ones" if ones else "zeros")

    def norm(name: str, before: tuple[int, ...], size: int) -> dict[str, Param]:
        bias = {f"{name}_bias": vector(before, (size,), None)} if vision.norm == "layer" else {}
        return {name: vector(before, (size,), None, ones=True)} | bias

    def merging(before: tuple[int, ...], normed: int) -> dict[str, Param]:
        size, out = vision.merged_size, vision.out_size
        return norm("norm", before, normed) | {
            "inner": weight(before, (size, size), ("embed", size), ("mlp", size)),
            "inner_bias": vector(before, (size,), ("mlp", size)),
            "outer": weight(before, (size, out), ("mlp", size), ("embed", out)),
            "outer_bias": vector(before, (out,), None),
        }

    shape = (vision.num_heads, vision.head_dim)
    attention = {name: weight(count, (width, *shape), embed, heads, None) for name in ("query", "key", "value")}
    attention |= {f"{name}_bias": vector(count, shape, heads, None) for name in ("query", "key", "value")}
    attention |= {"output": weight(count, (*shape, width), heads, None, embed, inputs=2)}
    names = ("gate", "up") if vision.gated else ("up",)
    mlp = {name: weight(count, (width, inner), embed, wide) for name in names}
    mlp |= {f"{name}_bias": vector(count, (inner,), wide) for name in names}
    mlp |= {"down": weight(count, (inner, width), wide, embed), "down_bias": vector(count, (width,), None)}
    sides = (vision.patch_size, vision.patch_size)
    pixels = (3, *([vision.frames] if vision.frames > 1 else []), *sides)
    tree = {
        "patch": weight((), (*pixels, width), *[None] * len(pixels), embed, inputs=len(pixels)),
        "layers": norm("attention_norm", count, width)
        | norm("mlp_norm", count, width)
        | {"attention": attention | {"output_bias": vector(count, (width,), None)}, "mlp": mlp},
    }
    if vision.patch_bias:
        tree["patch_bias"] = vector((), (width,), None)
    if vision.positions:
        tree["positions"] = Param((vision.positions, width), (None, embed), fan_in=width)
    if vision.merger == "mlp":
        tree["merger"] = merging((), width)
    else:
        projection = weight((), (width, vision.out_size), embed, None)
        tree |= norm("final_norm", (), width)
        tree["merger"] = {"norm": vector((), (width,), None), "projection": projection}
    if vision.deepstack:
        tree["deepstack"] = merging((len(vision.deepstack),), vision.merged_size)
    return tree
