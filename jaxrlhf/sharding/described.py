"""Arrays that are described and not there, for devices that programs are only compiled for.

A topology of devices that this machine does not have (`jax.experimental.topologies`) makes meshes like any
other. What is laid out over such a mesh are shapes with shardings, and what would run is lowered instead.
"""

from collections.abc import Sequence
from typing import Any

import jax


def are_here(devices: Sequence[jax.Device]) -> bool:
    """Return whether devices can run programs; those of a topology cannot."""
    try:
        return devices[0] in jax.devices(devices[0].platform)
    except RuntimeError:  # there is no such platform
        return False


def described(tree: Any, layout: Any = None) -> Any:
    """Shapes, dtypes and shardings of arrays.

    Args:
      layout: Shardings to give them, or formats, which are those with an order in memory: a tree, of which one may
        stand for all below it. None keeps their own.
    """

    def one(leaf: Any, sharding: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    if layout is None:
        return jax.tree.map(lambda leaf: one(leaf, getattr(leaf, "sharding", None)), tree)
    return jax.tree.map(one, tree, jax.tree.broadcast(layout, tree))
