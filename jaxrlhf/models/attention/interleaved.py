"""Interleaved positions of a cache that several devices share (decode context parallelism).

With c devices, device i has the positions p with p mod c = i, as its entries p div c: a c-th of any beginning of a
sequence. A cache therefore grows, takes prompts and returns prompts without communication, and all devices read
equally much. Mesh axes split an array's dimension of positions, in which one device's entries follow another's.
"""

import jax.numpy as jnp

from jaxrlhf.batch import Array


def interleave(leaf: Array, ways: int, *, axis: int) -> Array:
    """Reorder the positions of an array from sequence order to interleaved order, one device's after another's."""
    if ways == 1:
        return leaf
    shape = leaf.shape
    parts = leaf.reshape(*shape[:axis], shape[axis] // ways, ways, *shape[axis + 1 :])
    return jnp.swapaxes(parts, axis, axis + 1).reshape(shape)


def resized(leaf: Array, positions: int, ways: int, *, axis: int) -> Array:
    """Truncate or zero-pad an interleaved array to `positions` positions; every device keeps its own positions."""
    parts = by_device(leaf, ways, axis=axis)
    more = positions // ways - parts.shape[axis + 1]
    if more > 0:
        parts = jnp.pad(parts, [(0, more if dim == axis + 1 else 0) for dim in range(parts.ndim)])
    kept = parts[(slice(None),) * (axis + 1) + (slice(positions // ways),)]
    return kept.reshape(*leaf.shape[:axis], positions, *leaf.shape[axis + 1 :])


def by_device(leaf: Array, ways: int, *, axis: int) -> Array:
    """Reshape an interleaved array to have a dimension of devices before the dimension of their entries."""
    return leaf.reshape(*leaf.shape[:axis], ways, leaf.shape[axis] // ways, *leaf.shape[axis + 1 :])


def place_of(position: Array, positions: int, ways: int) -> Array:
    """Return the index of a position in an interleaved array of `positions` positions."""
    return position if ways == 1 else position % ways * (positions // ways) + position // ways


def entries_before(position: Array, device: Array, ways: int) -> Array:
    """Return the number of a device's entries whose positions are below `position`."""
    return (position - device + ways - 1) // ways
