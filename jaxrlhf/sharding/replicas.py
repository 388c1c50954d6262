"""Data-parallel replicas of the weights, each of which computes its own rows.

Along `data` weights are whole. Left to itself the compiler sums their gradient over these devices
in the program of every microbatch. Where each replica runs the program alone, under `jax.shard_map`,
a gradient is the replica's own, and the sum over replicas can wait for the last microbatch.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from jaxrlhf.sharding.mesh import BATCH_AXES, REPLICA_AXES, STAGE_AXES, TENSOR_AXES, WIDTH_AXES


@dataclass(frozen=True)
class Replicas:
    """Axes of a mesh that tell replicas apart; build it by `replicas_of`.

    Attributes:
      axes: Names of the axes; empty if the compiler splits programs over the whole mesh, as if there was one replica.
    """

    mesh: Mesh
    axes: tuple[str, ...]

    @property
    def count(self) -> int:
        """Number of replicas that compute by themselves."""
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
    def each(self) -> PartitionSpec:
        """Spec of arrays with a part for each replica along their first dimension."""
        return PartitionSpec(self.axes)

    def stacked(self, sharding: NamedSharding) -> NamedSharding:
        """Sharding of one array for each replica, stacked."""
        return NamedSharding(self.mesh, PartitionSpec(self.axes, *sharding.spec)) if self.axes else sharding

    def stacked_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of one array for each replica, stacked; one replica stacks nothing."""
        return (self.count, *shape) if self.axes else shape

    def run(self, function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
        """`function` run by each replica on its part of the arrays that the specs divide; XLA splits the rest."""
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
    """Replicas of a mesh that run programs alone, where the compiler can.

    XLA (of JAX 0.10) aborts if, inside a replica, it splits a table of embeddings both along the
    vocabulary and along its width. Layouts with both kinds of axes are left to the compiler.
    """
    widths, layers = (
        math.prod(mesh.shape[axis] for axis in axes) for axes in (WIDTH_AXES, (*STAGE_AXES, *TENSOR_AXES))
    )
    apart = math.prod(mesh.shape[axis] for axis in REPLICA_AXES) > 1 and min(widths, layers) == 1
    return Replicas(mesh, REPLICA_AXES if apart else ())
