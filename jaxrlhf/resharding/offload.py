"""Arrays out of device memory into the host's, and back exactly as they were.

    optimizer, moved = to_host(optimizer)      # its device buffers are freed
    optimizer, moved = to_device(optimizer)    # the same sharding, the same bits

Devices that have the memory kind `pinned_host` keep the arrays there, as arrays of JAX; for
others each block becomes a numpy array. Either way every process moves the shards that it
holds, so arrays may span processes.
"""

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding

PINNED = "pinned_host"

Block = tuple[tuple[int | None, int | None], ...]
"""Place of a shard in its array: start and stop along each dimension."""


class Moved(NamedTuple):
    """Cost of a move between device and host, or of a switch of layouts.

    Attributes:
      bytes_per_device: Most bytes that any device of this process sent or received.
      seconds: Wall-clock time; a first switch compiles its programs too.
    """

    bytes_per_device: int
    seconds: float


@dataclass(frozen=True, eq=False)
class HostArray:
    """This process's part of one array, in numpy: a leaf of a tree without its device memory.

    Attributes:
      sharding: Where the array was and will be again.
      blocks: Shards that are equal, because devices replicate them, are kept once.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    sharding: Sharding
    blocks: Mapping[Block, np.ndarray]


def to_host(tree: Any, *, pinned: bool | None = None) -> tuple[Any, Moved]:
    """The tree with its arrays in host memory. Their device buffers are freed.

    Whoever else refers to those arrays loses them too. A leaf that occurs twice moves once and
    stays tied. Random keys, arrays that are on the host already or deleted, and leaves that are no
    arrays of JAX stay as they are.

    Args:
      pinned: Whether to use the devices' pinned host memory; None uses it where there is some.

    Raises:
      ValueError: An array is committed to no device, or `pinned` is asked of devices that have
        no pinned host memory.
    """
    arrays = _distinct(tree, lambda leaf: _on_device(leaf) and not leaf.is_deleted())
    for array in arrays:
        if not array.committed:
            raise ValueError(
                f"an array of shape {array.shape} is committed to no device, so there is no place that it came from; "
                "give it a sharding (jax.device_put, or out_shardings of the jit that makes it)"
            )
    has_pinned = all(_has_pinned(array) for array in arrays)
    if pinned and not has_pinned:
        raise ValueError(f"pinned=True, and the devices have no {PINNED!r} memory; use pinned=None or False")
    start, sent = time.perf_counter(), _most(device_bytes(arrays))
    use_pinned = has_pinned if pinned is None else pinned
    kept = _to_memory(arrays, [PINNED] * len(arrays)) if use_pinned else _to_numpy(arrays)
    for array in arrays:
        array.delete()
    return _replaced(tree, arrays, kept), Moved(sent, time.perf_counter() - start)


def to_device(tree: Any) -> tuple[Any, Moved]:
    """The tree that `to_host` was given, in the default memory of its devices.

    The host's copies are freed. Leaves that `to_host` would leave alone stay as they are.
    """
    start = time.perf_counter()
    pinned, blocks = _distinct(tree, _is_pinned), _distinct(tree, lambda leaf: isinstance(leaf, HostArray))
    back = _to_memory(pinned, [_device(array).default_memory().kind for array in pinned]) + _from_numpy(blocks)
    for array in pinned:
        array.delete()
    returned = _replaced(tree, [*pinned, *blocks], back)
    return returned, Moved(_most(device_bytes(back)), time.perf_counter() - start)


def copied_to(blocks: Sequence[np.ndarray], devices: Sequence[jax.Device]) -> list[jax.Array]:
    """Each block in its device's memory, sharing none with the host's or with another device."""
    # On CPU, JAX takes a numpy array that is well aligned for the device's buffer, whatever `may_alias` says.
    own = [np.array(x) if device.platform == "cpu" else x for x, device in zip(blocks, devices, strict=True)]
    return jax.block_until_ready(jax.device_put(own, list(devices)))


def device_bytes(tree: Any) -> dict[jax.Device, int]:
    """Bytes that a tree takes in the memory of each of this process's devices; on the host it takes none.

    An array that occurs twice counts once.
    """
    counts: Counter[jax.Device] = Counter()
    for array in _distinct(tree, _on_device):
        shard = math.prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize
        counts.update(dict.fromkeys(array.sharding.addressable_devices, 0 if array.is_deleted() else shard))
    return dict(counts)


def _to_memory(arrays: Sequence[jax.Array], kinds: Sequence[str]) -> list[jax.Array]:
    """Copies in another memory of the same devices, shard by shard, so that they may span processes."""
    shards = [(shard, kind) for array, kind in zip(arrays, kinds, strict=True) for shard in array.addressable_shards]
    places = [SingleDeviceSharding(shard.device, memory_kind=kind) for shard, kind in shards]
    copies = jax.block_until_ready(jax.device_put([shard.data for shard, _ in shards], places))
    targets = [array.sharding.with_memory_kind(kind) for array, kind in zip(arrays, kinds, strict=True)]
    return list(_assembled([array.shape for array in arrays], targets, copies))


def _to_numpy(arrays: Sequence[jax.Array]) -> list[HostArray]:
    for array in arrays:
        for shard in array.addressable_shards:
            shard.data.copy_to_host_async()
    return [_host_array(array) for array in arrays]


def _host_array(array: jax.Array) -> HostArray:
    distinct = {_block(shard.index): shard.data for shard in array.addressable_shards}
    # Copies: on CPU, numpy's view of a shard would keep the device buffer alive.
    blocks = {block: np.array(data) for block, data in distinct.items()}
    return HostArray(array.shape, array.dtype, array.sharding, blocks)


def _from_numpy(arrays: Sequence[HostArray]) -> list[jax.Array]:
    places = [
        (device, array.blocks[_block(index)])
        for array in arrays
        for device, index in array.sharding.devices_indices_map(array.shape).items()
        if device in array.sharding.addressable_devices
    ]
    copies = copied_to([block for _, block in places], [device for device, _ in places])
    return list(_assembled([array.shape for array in arrays], [array.sharding for array in arrays], copies))


def _assembled(
    shapes: Sequence[tuple[int, ...]], targets: Sequence[Sharding], shards: Sequence[jax.Array]
) -> Iterator[jax.Array]:
    """Arrays from all their shards of this process, which follow one another."""
    rest = iter(shards)
    for shape, sharding in zip(shapes, targets, strict=True):
        own = [next(rest) for _ in sharding.addressable_devices]
        yield jax.make_array_from_single_device_arrays(shape, sharding, own)


def _block(index: tuple[slice, ...]) -> Block:
    """An index as a key; slices have no hash before Python 3.12."""
    return tuple((part.start, part.stop) for part in index)


def _device(array: jax.Array) -> jax.Device:
    return next(iter(array.sharding.addressable_devices))


def _has_pinned(array: jax.Array) -> bool:
    return any(memory.kind == PINNED for memory in _device(array).addressable_memories())


def _is_key(leaf: jax.Array) -> bool:
    return jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.extended)


def _is_pinned(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and not _is_key(leaf) and leaf.sharding.memory_kind == PINNED


def _on_device(leaf: Any) -> bool:
    if not isinstance(leaf, jax.Array) or _is_key(leaf):
        return False
    return leaf.sharding.memory_kind in (None, _device(leaf).default_memory().kind)


def _distinct(tree: Any, wanted: Callable[[Any], bool]) -> list[Any]:
    """The leaves that are wanted, each object once."""
    return list({id(leaf): leaf for leaf in jax.tree.leaves(tree) if wanted(leaf)}.values())


def _replaced(tree: Any, old: Sequence[Any], new: Sequence[Any]) -> Any:
    by_id = {id(was): now for was, now in zip(old, new, strict=True)}
    return jax.tree.map(lambda leaf: by_id.get(id(leaf), leaf), tree)


def _most(counts: Mapping[jax.Device, int]) -> int:
    return max(counts.values(), default=0)
