"""Execution of a model: its dtype, its kernels, and how the arrays of a layer are split over devices."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jaxrlhf.batch import Array
from jaxrlhf.models.pipeline import Pipeline

RowsKernel = Literal["xla", "flash", "splash"]
DecodeKernel = Literal["xla", "pallas"]
PagesKernel = Literal["xla", "pallas", "ragged"]


@dataclass(frozen=True)
class Execution:
    """One description of how a model is computed, which every forward function takes. The default is one device.

    The compiler splits `xla` kernels by itself. It would gather the arrays of any other kernel, so that one
    runs on each device of `mesh` with the rows and the heads that are there.

    Attributes:
      dtype: Dtype of activations and of the cache.
      remat: True to keep only each layer's input for the backward pass and compute the rest again.
      offloads: True to have what is kept wait in host memory; only with `remat`.
      rows_kernel: Kernel of attention of packed rows and of prompts.
      decode_kernel: Kernel of attention of one token per slot.
      pages_kernel: Kernel of attention to pages; None where a cache does not lie in pages.
      mesh: Auto axes; None is one device, or arrays that are the compiler's to split.
      row_axes: Mesh axes that split rows (or slots), evenly.
      token_axes: Mesh axes that split the tokens of a row, evenly (context parallelism); attention exchanges them
        for heads.
      width_axes: Mesh axes that split rows or their tokens, and weights by their width (`fsdp`); empty where weights
        are whole along them.
      head_axes: Mesh axes that split query heads, key-value heads and the width of MLPs, evenly.
      expert_axes: Last of `row_axes`, if they divide the experts of a layer as well.
      cache_axes: Mesh axes that split the positions of a cache in slots, which are taken in turn (`interleaved`).
      kv_ways: Parts that key-value heads split into, over `head_axes`: heads are repeated after their projection
        until they do, and caches hold the copies.
      ring_entries: R, entries that a slot has in layers with a window, where its cache is a ring of them; None gives
        these layers as many as others.
      pipeline: Stages that divide the layers; None is one. Rows have to split over its row axes.
    """

    dtype: Any = jnp.float32
    remat: bool = False
    offloads: bool = False
    rows_kernel: RowsKernel = "xla"
    decode_kernel: DecodeKernel = "xla"
    pages_kernel: PagesKernel | None = None
    mesh: Mesh | AbstractMesh | None = None
    row_axes: tuple[str, ...] = ()
    token_axes: tuple[str, ...] = ()
    width_axes: tuple[str, ...] = ()
    head_axes: tuple[str, ...] = ()
    expert_axes: tuple[str, ...] = ()
    cache_axes: tuple[str, ...] = ()
    kv_ways: int = 1
    ring_entries: int | None = None
    pipeline: Pipeline | None = None

    @property
    def stages(self) -> int:
        """Number of parts that the layers are divided into."""
        return 1 if self.pipeline is None else self.pipeline.stages

    def kv_copies(self, kv_heads: int) -> int:
        """Times that each of so many key-value heads is repeated."""
        return math.lcm(kv_heads, self.kv_ways) // kv_heads

    @property
    def cache_ways(self) -> int:
        """Devices that share the positions of a slot."""
        return self.size(self.cache_axes)

    def over_heads(self, heads: int) -> tuple[str, ...]:
        """Mesh axes that split so many heads of a cache: none of a latent's one, which serves all."""
        return self.head_axes if heads % self.size(self.head_axes) == 0 else ()

    @property
    def slice_axes(self) -> tuple[str, ...]:
        """Mesh axes that split the slices of rows; the axes of experts stay last."""
        return (*self.token_axes, *self.row_axes)

    def size(self, axes: tuple[str, ...]) -> int:
        """Product of the sizes of mesh axes."""
        return 1 if self.mesh is None else math.prod(self.mesh.shape[axis] for axis in axes)

    def split(self, array: Array, *axes: tuple[str, ...] | None) -> Array:
        """The array with its first dimensions over mesh axes, the others whole."""
        if self.mesh is None:
            return array
        return jax.lax.with_sharding_constraint(array, NamedSharding(self.mesh, PartitionSpec(*axes)))

    def split_rows(self, array_RWX: Array) -> Array:
        """The array with its rows, or slices, over the axes that split them.

        Left to itself the compiler may gather the rows and split the width instead of gathering each layer's weights.
        """
        return self.split(array_RWX, self.slice_axes)

    def slices(self, array_RWX: Array) -> Array:
        """Rows cut for the C devices that split their tokens, `[C R, W / C, ...]`: a slice is a row of its own."""
        count = self.size(self.token_axes)
        if count == 1:
            return array_RWX
        rows, width, *rest = array_RWX.shape
        array_RCYX = array_RWX.reshape(rows, count, width // count, *rest)
        array_CRYX = self.split(jnp.moveaxis(array_RCYX, 1, 0), self.token_axes, self.row_axes)
        return self.split_rows(array_CRYX.reshape(count * rows, -1, *rest))

    def joined(self, array_SYX: Array) -> Array:
        """Rows of slices, `[R, W, ...]`; the inverse of `slices`."""
        count = self.size(self.token_axes)
        if count == 1:
            return array_SYX
        slices, width, *rest = array_SYX.shape
        array_CRYX = self.split(array_SYX.reshape(count, -1, width, *rest), self.token_axes, self.row_axes)
        array_RWX = jnp.moveaxis(array_CRYX, 0, 1).reshape(slices // count, -1, *rest)
        return self.split(array_RWX, self.row_axes, self.token_axes)

    def on_devices(self, kernel: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
        """`kernel` run by every device on its own part of the arrays, also inside a pipeline stage."""
        if self.mesh is None:
            return kernel
        manual = set(jax.sharding.get_abstract_mesh().manual_axes)
        left = [axis for axis in self.mesh.axis_names if axis not in manual]

        def rest(spec: PartitionSpec) -> PartitionSpec:
            groups = [(axes,) if isinstance(axes, str) else axes or () for axes in spec]
            return PartitionSpec(*[tuple(axis for axis in axes if axis not in manual) for axes in groups])

        specs = jax.tree.map(rest, (in_specs, out_specs), is_leaf=lambda leaf: isinstance(leaf, PartitionSpec))
        # Kernels do not say over which axes their results vary, which the check would want to know.
        how = {"in_specs": specs[0], "out_specs": specs[1], "check_vma": False}
        if not manual:
            return jax.shard_map(kernel, mesh=self.mesh, **how)
        return jax.shard_map(kernel, axis_names=set(left), **how)


ONE_DEVICE = Execution()
"""Float32 on one device, by what every backend computes."""
