"""Positions of a cache that several devices share (decode context parallelism): they take them in turn.

Of c devices, device i has the positions p with p mod c = i, as its entries p div c: a c-th of any beginning of a
sequence. So a cache grows, takes prompts and gives them back with nothing sent, and every device has as much to read.
An array has the entries of one device after those of another in its dimension of positions, which mesh axes split.
"""

import jax.numpy as jnp

from jaxrlhf.batch import Array


def dealt(leaf: Array, ways: int, *, axis: int) -> Array:
    """An array whose positions are in their order, with those of one device after another's."""
    if ways == 1:
        return leaf
    shape = leaf.shape
    parts = leaf.reshape(*shape[:axis], shape[axis] // ways, ways, *shape[axis + 1 :])
    return jnp.swapaxes(parts, axis, axis + 1).reshape(shape)


def resized(leaf: Array, positions: int, ways: int, *, axis: int) -> Array:
    """The first positions of an interleaved array, and zeros behind its last: every device keeps its own."""
    parts = by_device(leaf, ways, axis=axis)
    more = positions // ways - parts.shape[axis + 1]
    if more > 0:
        parts = jnp.pad(parts, [(0, more if dim == axis + 1 else 0) for dim in range(parts.ndim)])
    kept = parts[(slice(None),) * (axis + 1) + (slice(positions // ways),)]
    return kept.reshape(*leaf.shape[:axis], positions, *leaf.shape[axis + 1 :])


def by_device(leaf: Array, ways: int, *, axis: int) -> Array:
    """An interleaved array with a dimension of devices before that of their entries."""
    return leaf.reshape(*leaf.shape[:axis], ways, leaf.shape[axis] // ways, *leaf.shape[axis + 1 :])


def place_of(position: Array, positions: int, ways: int) -> Array:
    """Index of a position in an interleaved array of so many."""
    return position if ways == 1 else position % ways * (positions // ways) + position // ways


def entries_before(position: Array, device: Array, ways: int) -> Array:
    """Entries of a device whose positions come before one."""
    return (position - device + ways - 1) // ways
