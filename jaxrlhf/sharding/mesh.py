"""Factored device mesh of a role; the training and the generation layout are two views of the mesh.

Training splits weights over `stage` and `micro_stage`, and over `tensor` and `micro_tensor`. Generation splits weights
over `stage` and `tensor` alone; the micro axes then split the responses, like `data` and `fsdp`. Training splits the
tokens of a row over `context` and `micro_context`; generation splits the KV cache over `context`. Each micro axis comes
right after the axis that it completes, so every device's training shard is inside its generation shard.

Source: HybridFlow (arXiv:2409.19256), section 5.3 (the grouping of Figure 8b).
"""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from jaxrlhf.config import Layout, Refusal

AXES = ("data", "fsdp", "expert", "context", "micro_context", "stage", "micro_stage", "tensor", "micro_tensor")
"""Axes of every mesh, slowest first."""

WEIGHT_AXES = ("fsdp", "expert")
"""Axes that split rows, and in training also weights: experts over `expert`, all other weights over both axes."""

REPLICA_AXES = ("data",)
"""Axes that split only rows: weights are replicated along them."""

BATCH_AXES = (*REPLICA_AXES, *WEIGHT_AXES)
"""Axes that split the rows of a training batch."""

TOKEN_AXES = ("context", "micro_context")
"""Axes that split the tokens of a row in training, and also the weights, like `fsdp`."""

WIDTH_AXES = (*TOKEN_AXES, *WEIGHT_AXES)
"""Axes that split every layer's weights along their width in training."""

# `expert` is last here and in BATCH_AXES: the tokens of the devices that divide the experts are one block, and one
# gather collects them.
SLOT_AXES = ("data", "fsdp", "micro_context", "micro_stage", "micro_tensor", "expert")
"""Axes that split the slots of the generation engine."""

CACHE_AXES = ("context",)
"""Axes that split the positions of a slot of the KV cache."""

EXPERT_AXES = ("expert",)
"""Axes that divide the experts of a layer, in training and in generation."""

STAGE_AXES = ("stage", "micro_stage")
"""Axes that divide the layers in training."""

TENSOR_AXES = ("tensor", "micro_tensor")
"""Axes that split every layer in training."""

TRAINING_AXES: dict[str, Any] = {
    "row_axes": BATCH_AXES,
    "head_axes": TENSOR_AXES,
    "expert_axes": EXPERT_AXES,
    "stage_axes": STAGE_AXES,
    "weight_axes": WEIGHT_AXES,
    "token_axes": TOKEN_AXES,
}
"""Axes of a training mesh as keyword arguments of `choose_execution`."""

GENERATION_AXES: dict[str, Any] = {
    "row_axes": SLOT_AXES,
    "head_axes": ("tensor",),
    "expert_axes": EXPERT_AXES,
    "stage_axes": ("stage",),
    "cache_axes": CACHE_AXES,
}
"""Axes of a generation mesh as keyword arguments of `choose_execution`."""


def factored_mesh(layout: Layout, devices: Sequence[jax.Device], *, role: str = "actor") -> Mesh:
    """Build the training mesh of a role over `devices`, in their order.

    Raises:
      Refusal: The layout's sizes do not multiply to the number of devices.
    """
    total = len(devices)
    split = layout.copy_devices
    data = total // split if layout.data is None else layout.data
    if data * split != total:
        sizes = {"data": layout.data or "rest", "fsdp": layout.fsdp, "stage": layout.stage, "tensor": layout.tensor}
        sizes |= {name: size for name in ("expert", "context") if (size := getattr(layout, name)) > 1}
        given = " x ".join(f"{name}={size}" for name, size in sizes.items())
        split_by = " * ".join(name for name in sizes if name != "data")
        fits = f"data={total // split} does" if total % split == 0 else f"{split_by} {_one_of(total)}"
        raise Refusal(f"{role}: {given} does not fill {total} devices; the product must be {total}: {fits}")
    if layout.refines:
        contexts = {"context": layout.generation_context, "micro_context": layout.micro_context}
        stages = {"stage": layout.generation_stage, "micro_stage": layout.micro_stage}
        tensors = {"tensor": layout.generation_tensor, "micro_tensor": layout.micro_tensor}
    else:
        contexts, stages, tensors = {"context": layout.context}, {"stage": layout.stage}, {"tensor": layout.tensor}
    rows = {"data": data, "fsdp": layout.fsdp, "expert": layout.expert}
    return mesh_of(rows | contexts | stages | tensors, devices)


def generation_mesh(layout: Layout, devices: Sequence[jax.Device], *, role: str = "actor") -> Mesh:
    """Build the generation mesh of a role: the training mesh if the training layout refines the generation layout.

    Otherwise build another mesh over the same devices in the same order, because a compiled program refuses arrays
    over another order.

    Raises:
      Refusal: The layout's sizes do not fill the devices, in training or in generation.
    """
    train = factored_mesh(layout, devices, role=role)
    if layout.refines:
        return train
    return replica_mesh(layout, devices, role=role)


def replica_mesh(layout: Layout, devices: Sequence[jax.Device], *, role: str) -> Mesh:
    """Build a mesh for generation alone, filled with replicas of the generation layout.

    Raises:
      Refusal: The replicas do not fill the devices.
    """
    total, replica = len(devices), layout.replica_devices
    if total % replica:
        names = ("expert", "generation_context")
        more = "".join(f"{name}={size} x " for name in names if (size := getattr(layout, name)) > 1)
        raise Refusal(
            f"{role}: {more}generation_stage={layout.generation_stage} x "
            f"generation_tensor={layout.generation_tensor} does not fill {total} devices with replicas of {replica}; "
            f"the product {_one_of(total)}"
        )
    axes = ("context", "stage", "tensor")
    sizes = {"expert": layout.expert} | {axis: getattr(layout, f"generation_{axis}") for axis in axes}
    return mesh_of({"data": total // replica, **sizes}, devices)


def mesh_of(sizes: dict[str, int], devices: Sequence[jax.Device]) -> Mesh:
    """Build a mesh over `AXES`; axes missing in `sizes` have size 1."""
    shape = [sizes.get(axis, 1) for axis in AXES]
    return Mesh(np.asarray(devices).reshape(shape), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def _one_of(total: int) -> str:
    return f"must be one of {[n for n in range(1, total + 1) if total % n == 0]}"
