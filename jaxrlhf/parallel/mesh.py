"""One factored mesh per role, of which the training and the generation layout are views.

The axes are `(data, fsdp, tensor, micro)`. Training splits a layer over `tensor` and `micro`
together, generation over `tensor` alone; `micro`, like `data` and `fsdp`, is then one more
way to split the responses. Because `micro` is the fastest axis, every device's training
shard lies inside the shard it generates with.

Source: HybridFlow (arXiv:2409.19256), section 5.3 (the grouping of Figure 8b).
"""

from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from jaxrlhf.config import Layout

AXES = ("data", "fsdp", "tensor", "micro")

BATCH_AXES = ("data", "fsdp")
"""Axes that split the rows of a training batch."""

SLOT_AXES = ("data", "fsdp", "micro")
"""Axes that split the slots of the generation engine."""


def factored_mesh(layout: Layout, devices: Sequence[jax.Device], *, role: str = "actor") -> Mesh:
    """The mesh of one role over `devices`, in their given order.

    Raises:
      ValueError: The layout's sizes do not multiply to the number of devices.
    """
    total = len(devices)
    model_parallel = layout.fsdp * layout.tensor
    data = total // model_parallel if layout.data is None else layout.data
    if data * model_parallel != total:
        divisors = [n for n in range(1, total + 1) if total % n == 0]
        raise ValueError(
            f"{role}: data={layout.data or 'rest'} x fsdp={layout.fsdp} x tensor={layout.tensor} does not fill "
            f"{total} devices; the product must be {total}, so fsdp * tensor must be one of {divisors}"
        )
    shape = (data, layout.fsdp, layout.generation_tensor, layout.micro)
    return Mesh(np.asarray(devices).reshape(shape), AXES, axis_types=(AxisType.Auto,) * len(AXES))
