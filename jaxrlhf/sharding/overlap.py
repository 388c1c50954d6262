"""Bytes that the shards of two layouts have in common on each device."""

import math
from typing import Any

import jax
from jax.sharding import Sharding


def span(index: tuple[slice, ...], shape: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """First and past-the-last position of a shard in each dimension."""
    return tuple((s.start or 0, size if s.stop is None else s.stop) for s, size in zip(index, shape, strict=True))


def _shards(source: Sharding, target: Sharding, shape: tuple[int, ...]) -> dict[jax.Device, tuple[int, int, int]]:
    """Per device: elements in its source shard, in its target shard, and in both."""
    sources = source.devices_indices_map(shape)
    counts = {}
    for device, index in target.devices_indices_map(shape).items():
        old, new = span(sources[device], shape), span(index, shape)
        both = math.prod(max(0, min(b, d) - max(a, c)) for (a, b), (c, d) in zip(old, new, strict=True))
        counts[device] = (math.prod(b - a for a, b in old), math.prod(b - a for a, b in new), both)
    return counts


def refines(source: Sharding, target: Sharding, shape: tuple[int, ...]) -> bool:
    """True if every device's shard under `source` lies inside its shard under `target`."""
    return all(both == old for old, _, both in _shards(source, target, shape).values())


def missing_bytes(source: Any, target: Any, shapes: Any) -> int:
    """Most bytes, over devices, of a target shard that the device does not hold yet.

    Args:
      shapes: Tree of shaped arrays, with the dtype that travels.
    """
    totals: dict[jax.Device, int] = {}
    for old, new, array in zip(*map(jax.tree.leaves, (source, target, shapes)), strict=True):
        for device, (_, wanted, both) in _shards(old, new, array.shape).items():
            totals[device] = totals.get(device, 0) + (wanted - both) * array.dtype.itemsize
    return max(totals.values(), default=0)
