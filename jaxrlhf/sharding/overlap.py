"""Overlap of the shards of two layouts on each device, in elements and bytes."""

import math
from typing import Any

import jax
from jax.sharding import Sharding


def span(index: tuple[slice, ...], shape: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """Return the first and the past-the-last position of a shard in each dimension."""
    return tuple((s.start or 0, size if s.stop is None else s.stop) for s, size in zip(index, shape, strict=True))


def _shards(source: Sharding, target: Sharding, shape: tuple[int, ...]) -> dict[jax.Device, tuple[int, int, int]]:
    """Return per device the number of elements in the source shard, in the target shard, and in both."""
    sources = source.devices_indices_map(shape)
    counts = {}
    for device, index in target.devices_indices_map(shape).items():
        old, new = span(sources[device], shape), span(index, shape)
        both = math.prod(max(0, min(b, d) - max(a, c)) for (a, b), (c, d) in zip(old, new, strict=True))
        counts[device] = (math.prod(b - a for a, b in old), math.prod(b - a for a, b in new), both)
    return counts


def refines(source: Sharding, target: Sharding, shape: tuple[int, ...]) -> bool:
    """Return whether every device's shard under `source` is inside its shard under `target`."""
    return all(both == old for old, _, both in _shards(source, target, shape).values())


def missing_bytes(source: Any, target: Any, shapes: Any) -> int:
    """Return the bytes of target shards that a device must receive, as the maximum over devices.

    Args:
      shapes: Tree of shaped arrays, in the dtype that is sent.
    """
    totals: dict[jax.Device, int] = {}
    for old, new, array in zip(*map(jax.tree.leaves, (source, target, shapes)), strict=True):
        for device, (_, wanted, both) in _shards(old, new, array.shape).items():
            totals[device] = totals.get(device, 0) + (wanted - both) * array.dtype.itemsize
    return max(totals.values(), default=0)
