"""Offload of arrays from device memory to host memory, and back unchanged.

    optimizer, moved = to_host(optimizer)      # its device buffers are freed
    optimizer, moved = to_device(optimizer)    # the same sharding, the same bits

Offloaded arrays are still JAX arrays, in `pinned_host` memory, which CPU, GPU and TPU have. Every process moves its
own shards, so arrays may span processes.
"""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import SingleDeviceSharding

from jaxrlhf.config import Refusal

PINNED = "pinned_host"


class Moved(NamedTuple):
    """Cost of a move between device and host or between pools, or of a switch of layouts.

    Attributes:
      bytes_per_device: Bytes sent or received by a device, the maximum over this process's devices.
      seconds: Wall-clock time; the first switch includes compiling its programs.
    """

    bytes_per_device: int
    seconds: float


def to_host(tree: Any) -> tuple[Any, Moved]:
    """Move the arrays of a tree to host memory, and free their device buffers.

    Other references to the same arrays become invalid too. A leaf that occurs twice is moved once and stays tied.
    Random keys, arrays that are already on the host or deleted, and leaves that are no JAX arrays are left alone.

    Raises:
      ValueError: An array is committed to no device.
      Refusal: Devices have no pinned host memory.
    """
    arrays = _distinct(tree, lambda leaf: not leaf.is_deleted() and leaf.sharding.memory_kind in (None, _usual(leaf)))
    for array in arrays:
        if not array.committed:
            raise ValueError(
                f"an array of shape {array.shape} is committed to no device, so it cannot be moved back; set a "
                "sharding (jax.device_put, or out_shardings of jax.jit)"
            )
        device = _device(array)
        if all(memory.kind != PINNED for memory in device.addressable_memories()):
            raise Refusal(
                f"{device.device_kind} has no {PINNED!r} memory, which offloading and asynchronous weight transfer "
                "require; set offload=() and rollout.staleness=0"
            )
    return _moved(tree, arrays, [PINNED] * len(arrays))


def to_device(tree: Any) -> tuple[Any, Moved]:
    """Move a tree from `to_host` back to the default memory of its devices, and free the host copies.

    Leaves that are not in pinned host memory are left alone.
    """
    arrays = _distinct(tree, lambda leaf: leaf.sharding.memory_kind == PINNED)
    return _moved(tree, arrays, [_usual(array) for array in arrays])


def _moved(tree: Any, arrays: Sequence[jax.Array], kinds: Sequence[str]) -> tuple[Any, Moved]:
    """Move some arrays of a tree to another memory kind: shard by shard, so that arrays may span processes."""
    start, sent = time.perf_counter(), Counter[jax.Device]()
    shards = [(shard, kind) for array, kind in zip(arrays, kinds, strict=True) for shard in array.addressable_shards]
    for shard, _ in shards:
        sent[shard.device] += shard.data.nbytes
    places = [SingleDeviceSharding(shard.device, memory_kind=kind) for shard, kind in shards]
    copies = iter(jax.block_until_ready(jax.device_put([shard.data for shard, _ in shards], places)))
    there: dict[int, jax.Array] = {}
    for array, kind in zip(arrays, kinds, strict=True):
        own, target = [next(copies) for _ in array.addressable_shards], array.sharding.with_memory_kind(kind)
        there[id(array)] = jax.make_array_from_single_device_arrays(array.shape, target, own)
    for array in arrays:
        array.delete()
    moved = Moved(max(sent.values(), default=0), time.perf_counter() - start)
    return jax.tree.map(lambda leaf: there.get(id(leaf), leaf), tree), moved


def _device(array: jax.Array) -> jax.Device:
    return next(iter(array.sharding.addressable_devices))


def _usual(array: jax.Array) -> str:
    """Return the default memory kind of the array's devices."""
    return _device(array).default_memory().kind


def _distinct(tree: Any, wanted: Callable[[jax.Array], bool]) -> list[jax.Array]:
    """Return the wanted JAX arrays of a tree, each object once, without random keys."""
    arrays = [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array)]
    movable = [leaf for leaf in arrays if not jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.extended)]
    return list({id(leaf): leaf for leaf in movable if wanted(leaf)}.values())
