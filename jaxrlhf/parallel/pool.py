"""Named, disjoint sets of devices that roles are placed on."""

from dataclasses import dataclass

import jax


@dataclass(frozen=True)
class ResourcePool:
    """A set of devices that roles share.

    Roles on one pool run one after another, in call order; roles on different pools run
    side by side as soon as their inputs are there. Pools do not overlap.

    Source: HybridFlow (arXiv:2409.19256), section 4.1.
    """

    name: str
    devices: tuple[jax.Device, ...]

    @classmethod
    def of_all(cls, count: int | None = None) -> "ResourcePool":
        """One pool over the first `count` devices of this program, or all of them."""
        devices = jax.devices()
        if count is not None and count > len(devices):
            raise ValueError(
                f"devices={count} were asked for and JAX sees {len(devices)} {devices[0].platform} devices; "
                f"lower `devices`, or on CPU start with JAX_NUM_CPU_DEVICES={count}"
            )
        return cls("all", tuple(devices[:count]))
