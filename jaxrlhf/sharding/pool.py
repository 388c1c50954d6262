"""Named, disjoint sets of devices that roles are placed on."""

from dataclasses import dataclass

import jax


@dataclass(frozen=True)
class ResourcePool:
    """Set of devices that roles share.

    Roles on one pool run one after another, in call order. Roles on different pools run side by side as soon as their
    inputs are available. Pools do not overlap.

    Attributes:
      devices: Devices of all processes that share the pool, in mesh order.

    Source: HybridFlow (arXiv:2409.19256), section 4.1.
    """

    name: str
    devices: tuple[jax.Device, ...]
