"""Replicas of the weights, each of which computes by itself what it makes of its own rows.

Along `data` weights are whole. Left to itself the compiler sums their gradient over these devices
in the program of every microbatch; where each replica runs the program alone, as `jax.shard_map`
has it, a gradient is the replica's own, and the sum over replicas can wait for the last microbatch.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from jaxrlhf.sharding.mesh import BATCH_AXES, REPLICA_AXES, STAGE_AXES, TENSOR_AXES, WEIGHT_AXES


@dataclass(frozen=True)
class Replicas:
    """Replicas of the weights on a mesh, by the axes that tell them apart; build it by `replicas_of`.

    Attributes:
      mesh: Mesh of all devices.
      axes: Empty if the compiler splits programs over all axes of the mesh, as if there was one replica.
    """

    mesh: Mesh
    axes: tuple[str, ...]

    @property
    def count(self) -> int:
        """Replicas that compute by themselves."""
        return math.prod(self.mesh.shape[axis] for axis in self.axes)

    @property
    def inner_mesh(self) -> Mesh | AbstractMesh:
        """The mesh as a replica's program sees it."""
        manual = dict.fromkeys(self.axes, AxisType.Manual)
        return self.mesh.abstract_mesh.update_axis_types(manual) if manual else self.mesh

    @property
    def row_axes(self) -> tuple[str, ...]:
        """Axes that split the rows of one replica."""
        return tuple(axis for axis in BATCH_AXES if axis not in self.axes)

    @property
    def row_shards(self) -> int:
        """Devices that split the rows of one replica."""
        return math.prod(self.mesh.shape[axis] for axis in self.row_axes)

    @property
    def row_sharding(self) -> NamedSharding:
        """Sharding of the rows of one replica, in its program."""
        return NamedSharding(self.inner_mesh, PartitionSpec(self.row_axes))

    @property
    def each(self) -> PartitionSpec:
        """Sharding of an array with a part for each replica along its first dimension."""
        return PartitionSpec(self.axes)

    def stacked(self, sharding: NamedSharding) -> NamedSharding:
        """Sharding of stacked arrays of that sharding, one for each replica."""
        return NamedSharding(self.mesh, PartitionSpec(self.axes, *sharding.spec)) if self.axes else sharding

    def stacked_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of stacked arrays of that shape, one for each replica; with one replica nothing is stacked."""
        return (self.count, *shape) if self.axes else shape

    def run(self, function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
        """`function` run by each replica on its part of what the specs divide; all else is the compiler's."""
        if not self.axes:
            return function
        return jax.shard_map(
            function,
            mesh=self.mesh,
            axis_names=set(self.axes),
            in_specs=in_specs,
            out_specs=out_specs,
            check_vma=False,  # models of a user's own need not say what varies over replicas
        )


def replicas_of(mesh: Mesh) -> Replicas:
    """Replicas of a mesh that the compiler can take apart.

    XLA (of JAX 0.10) aborts where, inside a replica, it splits a table of embeddings both along the
    vocabulary and along its width. Layouts with both kinds of axes so are the compiler's alone.
    """
    widths, layers = (
        math.prod(mesh.shape[axis] for axis in axes) for axes in (WEIGHT_AXES, (*STAGE_AXES, *TENSOR_AXES))
    )
    apart = math.prod(mesh.shape[axis] for axis in REPLICA_AXES) > 1 and min(widths, layers) == 1
    return Replicas(mesh, REPLICA_AXES if apart else ())
