"""One factored mesh per role, of which the training and the generation layout are views.

Training splits weights over `stage` and `micro_stage`, `tensor` and `micro_tensor` together,
generation over `stage` and `tensor` alone; the micro axes, like `data` and `fsdp`, are then
more ways to split the responses. Because each micro axis comes right after the axis that it
completes, every device's training shard lies inside the shard it generates with.

Source: HybridFlow (arXiv:2409.19256), section 5.3 (the grouping of Figure 8b).
"""

from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from jaxrlhf.config import Layout

AXES = ("data", "fsdp", "expert", "context", "stage", "micro_stage", "tensor", "micro_tensor")
"""Slowest first. Experts and context parallelism have size 1 so far."""

BATCH_AXES = ("data", "fsdp")
"""Axes that split the rows of a training batch."""

SLOT_AXES = ("data", "fsdp", "micro_stage", "micro_tensor")
"""Axes that split the slots of the generation engine."""

STAGE_AXES = ("stage", "micro_stage")
"""Axes that divide the layers in training."""

TENSOR_AXES = ("tensor", "micro_tensor")
"""Axes that split every layer in training."""


def factored_mesh(layout: Layout, devices: Sequence[jax.Device], *, role: str = "actor") -> Mesh:
    """The training mesh of one role over `devices`, in their given order.

    Raises:
      ValueError: The layout's sizes do not multiply to the number of devices.
    """
    total = len(devices)
    split = layout.fsdp * layout.stage * layout.tensor
    data = total // split if layout.data is None else layout.data
    if data * split != total:
        given = f"data={layout.data or 'rest'} x fsdp={layout.fsdp} x stage={layout.stage} x tensor={layout.tensor}"
        fits = f"data={total // split} does" if total % split == 0 else f"fsdp * stage * tensor {_one_of(total)}"
        raise ValueError(f"{role}: {given} does not fill {total} devices; the product must be {total}: {fits}")
    if layout.refines:
        stages = {"stage": layout.generation_stage, "micro_stage": layout.micro_stage}
        tensors = {"tensor": layout.generation_tensor, "micro_tensor": layout.micro_tensor}
    else:
        stages, tensors = {"stage": layout.stage}, {"tensor": layout.tensor}
    return mesh_of({"data": data, "fsdp": layout.fsdp} | stages | tensors, devices)


def generation_mesh(layout: Layout, devices: Sequence[jax.Device], *, role: str = "actor") -> Mesh:
    """The mesh that a role generates on: the training mesh where the layout refines.

    Otherwise a mesh of its own over the same devices in the same order, because a compiled
    program refuses arrays over another order.

    Raises:
      ValueError: The layout's sizes do not fill the devices, in training or in generation.
    """
    train = factored_mesh(layout, devices, role=role)
    if layout.refines:
        return train
    return replica_mesh(layout, devices, role=role)


def replica_mesh(layout: Layout, devices: Sequence[jax.Device], *, role: str) -> Mesh:
    """A mesh that is for generation alone: as many replicas of the generation layout as fill the devices.

    Raises:
      ValueError: The replicas do not fill the devices.
    """
    total, replica = len(devices), layout.generation_stage * layout.generation_tensor
    if total % replica:
        raise ValueError(
            f"{role}: generation_stage={layout.generation_stage} x generation_tensor={layout.generation_tensor} "
            f"does not fill {total} devices with replicas of {replica}; the product {_one_of(total)}"
        )
    sizes = {"data": total // replica, "stage": layout.generation_stage, "tensor": layout.generation_tensor}
    return mesh_of(sizes, devices)


def mesh_of(sizes: dict[str, int], devices: Sequence[jax.Device]) -> Mesh:
    """A mesh over `AXES`; axes that `sizes` leaves out have size 1."""
    shape = [sizes.get(axis, 1) for axis in AXES]
    return Mesh(np.asarray(devices).reshape(shape), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def _one_of(total: int) -> str:
    return f"must be one of {[n for n in range(1, total + 1) if total % n == 0]}"
