"""Abstract arrays (shapes with shardings), for devices that programs are only compiled for.

A topology of devices that this machine does not have (`jax.experimental.topologies`) makes ordinary meshes. Over such
a mesh abstract arrays replace arrays, and programs are lowered instead of run.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax

_lowered_for: str | None = None
"""Platform of absent devices that all threads lower programs for; None is the platform of this process."""


def platform() -> str:
    """Return the platform of the devices that a program is traced for, such as `cpu`, `gpu` or `tpu`."""
    return jax.default_backend() if _lowered_for is None else _lowered_for


@contextmanager
def lowering_for(devices: Sequence[jax.Device]) -> Iterator[None]:
    """Trace for `devices` within the block, in every thread: programs are those of a run on these devices.

    The devices may be absent. Model functions traced for other devices before are traced again if jitted again.
    """
    global _lowered_for
    before, _lowered_for = _lowered_for, devices[0].platform
    try:
        yield
    finally:
        _lowered_for = before


def are_here(devices: Sequence[jax.Device]) -> bool:
    """Return whether devices can run programs; devices of a topology cannot."""
    try:
        return devices[0] in jax.devices(devices[0].platform)
    except RuntimeError:  # there is no such platform
        return False


def described(tree: Any, layout: Any = None) -> Any:
    """Return the abstract arrays of a tree of arrays: shapes, dtypes and shardings.

    Args:
      layout: Shardings, or formats (shardings with a memory layout), of the result: a tree that may be a prefix of
        `tree`. None keeps each array's sharding.
    """

    def one(leaf: Any, sharding: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    if layout is None:
        return jax.tree.map(lambda leaf: one(leaf, getattr(leaf, "sharding", None)), tree)
    return jax.tree.map(one, tree, jax.tree.broadcast(layout, tree))
