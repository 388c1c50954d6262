"""Submeshes: parts of a generation mesh that generate without communicating with each other.

A generation replica is a set of devices that differ only in `expert`, `context`, `stage` and `tensor`. In the
generation layout each replica has all weights. So a block of devices made of whole replicas can decode at its own pace,
once its part of the weights is viewed on a separate mesh.
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
    """Return the part of a generation mesh that spans `devices`; all devices give `mesh` itself.

    Args:
      mesh: Generation mesh over `AXES`.
      devices: Devices that are consecutive in the order of the mesh.

    Raises:
      Refusal: The devices are no block of the mesh, or split a generation replica.
    """
    order, count = list(mesh.devices.flat), len(devices)
    start = order.index(devices[0]) if count and devices[0] in order else -1
    if start < 0 or order[start : start + count] != list(devices):
        raise Refusal(
            f"devices {[d.id for d in devices]} are not a block of consecutive devices of the mesh "
            f"{[d.id for d in order]}; choose consecutive devices"
        )
    block = _replica_block(mesh)
    if count % block or start % block:
        replica = math.prod(mesh.shape[axis] for axis in _REPLICA_AXES)
        names = {"expert": "expert", "context": "generation_context"}
        more = "".join(f"{name} {mesh.shape[axis]} x " for axis, name in names.items() if mesh.shape[axis] > 1)
        raise Refusal(
            f"replicas of {more}generation_stage {mesh.shape['stage']} x generation_tensor {mesh.shape['tensor']} = "
            f"{replica} devices would span hosts: a replica uses a block of {block} devices of the mesh, which must "
            f"divide the {count} devices of a host; lower the layout's stage and tensor, or set generation_stage=1 "
            "and generation_tensor=1"
        )
    return mesh_of(_sizes(mesh, count), devices)


def local_submesh(mesh: Mesh) -> Mesh:
    """Return the submesh of this process; with one process, `mesh` itself.

    Raises:
      ValueError: A generation replica would span hosts, or the process has no device in the mesh.
    """
    process = jax.process_index()
    devices = [device for device in mesh.devices.flat if device.process_index == process]
    if not devices:
        raise ValueError(f"process {process} has no device in a mesh of {mesh.size}, so it cannot generate there")
    return submesh_of(mesh, devices)


def hand_over(weights: Any, submesh: Mesh) -> Any:
    """View weights as arrays on a submesh. The buffers are shared; nothing is copied.

    Deleting either side frees the buffers of both.

    Args:
      weights: Tree of weights in the generation layout, on the mesh that contains the submesh.

    Raises:
      ValueError: A leaf is not whole on the submesh.
    """
    return jax.tree_util.tree_map_with_path(lambda path, leaf: _view(path, leaf, submesh), weights)


def _view(path: Any, leaf: Any, submesh: Mesh) -> Any:
    if not isinstance(leaf.sharding, NamedSharding):
        raise ValueError(
            f"{jax.tree_util.keystr(path)} has sharding {leaf.sharding}; expected a NamedSharding, as engine weights "
            "have"
        )
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
            f"{jax.tree_util.keystr(path)} in layout {leaf.sharding.spec} is not complete on a submesh of "
            f"{submesh.size} devices; pass weights in the generation layout, with a submesh of their own mesh and "
            "process"
        )
    if leaf.is_fully_addressable:
        return jax.device_put(leaf, sharding)  # index maps are equal, so device_put reuses the buffers
    # device_put refuses arrays that span processes; assemble the array from this process's shards instead.
    return jax.make_array_from_single_device_arrays(leaf.shape, sharding, [shards[device].data for device in wanted])


def _replica_block(mesh: Mesh) -> int:
    """Return the number of devices in the smallest aligned block of whole replicas.

    The block spans all axes from the slowest axis that splits a replica.
    """
    axes = [axis for axis in _REPLICA_AXES if mesh.shape[axis] > 1]
    first = AXES.index(axes[0]) if axes else len(AXES)
    return math.prod(mesh.shape[axis] for axis in AXES[first:])


def _sizes(mesh: Mesh, count: int) -> dict[str, int]:
    """Return the axis sizes of a block: fill the axes from the fastest axis on; `data` takes the rest."""
    sizes = {}
    for axis in reversed(AXES):
        sizes[axis] = math.gcd(mesh.shape[axis], count)
        count //= sizes[axis]
    sizes["data"] *= count
    return sizes
