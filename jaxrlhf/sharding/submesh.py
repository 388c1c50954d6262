"""Submeshes: parts of a generation mesh that can generate without talking to each other.

Weights in the generation layout are whole within each generation replica, the devices that
differ in `expert`, `context`, `stage` and `tensor` alone. Any block of devices that is closed under replicas can
therefore decode at its own pace, once its part of the weights is viewed on a mesh of its own.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from jaxrlhf.config import Refusal
from jaxrlhf.sharding.described import described
from jaxrlhf.sharding.mesh import AXES, mesh_of
from jaxrlhf.sharding.overlap import span

_REPLICA_AXES = ("expert", "context", "stage", "tensor")


def submesh_of(mesh: Mesh, devices: Sequence[jax.Device]) -> Mesh:
    """The part of a generation mesh that spans these devices; all of them give `mesh` itself.

    Args:
      mesh: Over `AXES`.
      devices: Consecutive in the order of the mesh.

    Raises:
      Refusal: The devices are no block of the mesh, or cut a generation replica.
    """
    order, count = list(mesh.devices.flat), len(devices)
    start = order.index(devices[0]) if count and devices[0] in order else -1
    if start < 0 or order[start : start + count] != list(devices):
        raise Refusal(
            f"a submesh is a block of consecutive devices of its mesh, and {[d.id for d in devices]} is none of "
            f"{[d.id for d in order]}"
        )
    block = _replica_block(mesh)
    if count % block or start % block:
        replica = math.prod(mesh.shape[axis] for axis in _REPLICA_AXES)
        names = {"expert": "expert", "context": "generation_context"}
        more = "".join(f"{name} {mesh.shape[axis]} x " for axis, name in names.items() if mesh.shape[axis] > 1)
        raise Refusal(
            f"{count} devices cannot generate by themselves: a generation replica has {more}generation_stage "
            f"{mesh.shape['stage']} x generation_tensor {mesh.shape['tensor']} = {replica} devices, which lie within "
            f"{block} of the mesh, so replicas would span hosts; these {block} have to divide {count}: lower the "
            f"layout's stage and tensor, or generate with generation_stage=1 and generation_tensor=1"
        )
    return mesh_of(_sizes(mesh, count), devices)


def local_submesh(mesh: Mesh) -> Mesh:
    """The submesh of this process; with one process it is `mesh` itself.

    Raises:
      ValueError: A generation replica would span hosts, or the process has no device in the mesh.
    """
    process = jax.process_index()
    devices = [device for device in mesh.devices.flat if device.process_index == process]
    if not devices:
        raise ValueError(f"process {process} has no device in a mesh of {mesh.size}; it cannot generate there")
    return submesh_of(mesh, devices)


def hand_over(weights: Any, submesh: Mesh) -> Any:
    """Weights as arrays on a submesh. The buffers are shared, nothing is copied.

    Deleting either side frees the buffers of both.

    Args:
      weights: In the generation layout, on the mesh that the submesh is a part of.

    Raises:
      ValueError: A leaf is not whole on the submesh.
    """
    return jax.tree_util.tree_map_with_path(lambda path, leaf: _view(path, leaf, submesh), weights)


def _view(path: Any, leaf: Any, submesh: Mesh) -> Any:
    if not isinstance(leaf.sharding, NamedSharding):
        raise ValueError(f"{jax.tree_util.keystr(path)} has no named layout: {leaf.sharding}; hand over engine weights")
    sharding = NamedSharding(submesh, leaf.sharding.spec)
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return described(leaf, sharding)
    wanted = sharding.devices_indices_map(leaf.shape)
    shards = {shard.device: shard for shard in leaf.addressable_shards if shard.device in wanted}
    whole = shards.keys() == wanted.keys() and all(
        span(shards[device].index, leaf.shape) == span(index, leaf.shape) for device, index in wanted.items()
    )
    if not whole:
        raise ValueError(
            f"{jax.tree_util.keystr(path)} in layout {leaf.sharding.spec} is not whole on a submesh of {submesh.size} "
            f"devices; hand over weights in the generation layout, to a submesh of their own mesh and process"
        )
    if leaf.is_fully_addressable:
        return jax.device_put(leaf, sharding)  # index maps are equal, so it takes the buffers as they are
    # It refuses arrays that span processes; theirs are put together from this process's shards.
    return jax.make_array_from_single_device_arrays(leaf.shape, sharding, [shards[device].data for device in wanted])


def _replica_block(mesh: Mesh) -> int:
    """Devices in the smallest aligned block that holds whole replicas: from the slowest axis that splits one."""
    axes = [axis for axis in _REPLICA_AXES if mesh.shape[axis] > 1]
    first = AXES.index(axes[0]) if axes else len(AXES)
    return math.prod(mesh.shape[axis] for axis in AXES[first:])


def _sizes(mesh: Mesh, count: int) -> dict[str, int]:
    """Sizes of a block's axes: full from the fastest on, and what is left over is data."""
    sizes = {}
    for axis in reversed(AXES):
        sizes[axis] = math.gcd(mesh.shape[axis], count)
        count //= sizes[axis]
    sizes["data"] *= count
    return sizes
