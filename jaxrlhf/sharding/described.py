"""Arrays that are described and not there, for devices that programs are only compiled for.

A topology of devices that this machine does not have (`jax.experimental.topologies`) makes meshes like any
other. What is laid out over such a mesh are shapes with shardings, and what would run is lowered instead.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax

_lowered_for: str | None = None
"""Platform of described devices that programs are lowered for, in every thread; None is this process's own."""


def platform() -> str:
    """Platform of the devices that a program is traced for, such as `cpu`, `gpu` or `tpu`."""
    return jax.default_backend() if _lowered_for is None else _lowered_for


@contextmanager
def lowering_for(devices: Sequence[jax.Device]) -> Iterator[None]:
    """Trace for devices that need not be here within the block, in every thread: a program is then that of a run there.

    Functions of the model that were traced for other devices before are traced anew where they are jitted anew.
    """
    global _lowered_for
    before, _lowered_for = _lowered_for, devices[0].platform
    try:
        yield
    finally:
        _lowered_for = before


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
