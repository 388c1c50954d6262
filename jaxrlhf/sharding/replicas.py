"""Data-parallel replicas of the weights; each replica computes its own rows.

Weights are replicated along `data`. By default the compiler sums gradients over `data` in the program of every
microbatch. If each replica runs the program alone, under `jax.shard_map`, gradients stay local to the replica, and the
sum over replicas can wait for the last microbatch.
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
    """Data-parallel replicas on a mesh; build by `replicas_of`.

    Attributes:
      axes: Names of the mesh axes that distinguish replicas. Empty if the compiler splits programs over the whole mesh,
        as if there were one replica.
    """

    mesh: Mesh
    axes: tuple[str, ...]

    @property
    def count(self) -> int:
        """Number of replicas that run programs alone."""
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
        """Partition spec of arrays whose first dimension is split over replicas."""
        return PartitionSpec(self.axes)

    def stacked(self, sharding: NamedSharding) -> NamedSharding:
        """Return the sharding of a stack with one array per replica."""
        return NamedSharding(self.mesh, PartitionSpec(self.axes, *sharding.spec)) if self.axes else sharding

    def stacked_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of a stack with one array per replica; without `axes` there is no stack dimension."""
        return (self.count, *shape) if self.axes else shape

    def run(self, function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
        """Return `function` as run by each replica on its part of the arrays; the specs say how arrays are split."""
        if not self.axes:
            return function
        return jax.shard_map(
            function,
            mesh=self.mesh,
            axis_names=set(self.axes),
            in_specs=in_specs,
            out_specs=out_specs,
            check_vma=False,  # a user's model need not declare values that vary over replicas
        )


def replicas_of(mesh: Mesh) -> Replicas:
    """Return the replicas of a mesh; replicas run programs alone if XLA supports the layout.

    XLA (of JAX 0.10) aborts if, inside a replica, it splits an embedding table along both the vocabulary and the width.
    Layouts with both kinds of axes are left to the compiler.
    """
    widths, layers = (
        math.prod(mesh.shape[axis] for axis in axes) for axes in (WIDTH_AXES, (*STAGE_AXES, *TENSOR_AXES))
    )
    apart = math.prod(mesh.shape[axis] for axis in REPLICA_AXES) > 1 and min(widths, layers) == 1
    return Replicas(mesh, REPLICA_AXES if apart else ())
