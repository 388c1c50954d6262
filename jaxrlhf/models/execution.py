"""Execution of a model: dtype, kernels, and the mesh axes that split the arrays of a layer."""

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
    """Execution settings of a model, an argument of every forward function. The default is one device.

    The compiler shards `xla` kernels by itself. It would gather the arrays of any other kernel, so other kernels
    run on each device of `mesh` over the device's own rows and heads.

    Attributes:
      dtype: Dtype of activations and of the cache.
      remat: True keeps only each layer's input, and attention outputs over shared prompts, for the backward pass.
        The rest is recomputed.
      offloads: True stores the kept arrays in host memory; only with `remat`.
      rows_kernel: Attention kernel of packed rows and of prompts.
      decode_kernel: Attention kernel of one token per slot.
      pages_kernel: Attention kernel of a paged cache; None if the cache is not paged.
      mesh: Mesh with auto axes; None is one device, or arrays whose sharding is left to the compiler.
      row_axes: Mesh axes that split rows (or slots), evenly.
      token_axes: Mesh axes that split the tokens of a row, evenly (context parallelism); attention exchanges tokens
        for heads.
      width_axes: Mesh axes that split rows or their tokens, and also weights by their width (`fsdp`); empty if
        weights are not split by width.
      head_axes: Mesh axes that split query heads, key-value heads and the width of MLPs, evenly.
      expert_axes: Last axes of `row_axes`, if they also split the experts of a layer.
      cache_axes: Mesh axes that split the positions of a cache in slots; positions alternate over devices
        (`interleaved`).
      kv_ways: Number of parts that key-value heads split into, over `head_axes`. Heads are repeated after their
        projection until they split evenly, and caches hold the copies.
      ring_entries: R, number of entries of a slot in layers with a window, if the cache of these layers is a ring;
        None gives these layers as many entries as others.
      mtp_slots: Maximum number of slots for which the layer that predicts the second next token drafts. Above 0, caches
        have its keys and values after those of the other layers.
      pipeline: Pipeline stages that divide the layers; None is one stage. Rows must split evenly over its row axes.
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
    mtp_slots: int = 0
    pipeline: Pipeline | None = None

    @property
    def stages(self) -> int:
        """Number of pipeline stages."""
        return 1 if self.pipeline is None else self.pipeline.stages

    def kv_copies(self, kv_heads: int) -> int:
        """Return the number of times that each of `kv_heads` key-value heads is repeated."""
        return math.lcm(kv_heads, self.kv_ways) // kv_heads

    @property
    def cache_ways(self) -> int:
        """Number of devices that share the positions of a slot."""
        return self.size(self.cache_axes)

    def over_heads(self, heads: int) -> tuple[str, ...]:
        """Return the mesh axes that split `heads` heads of a cache; none for the single head of latents."""
        return self.head_axes if heads % self.size(self.head_axes) == 0 else ()

    @property
    def slice_axes(self) -> tuple[str, ...]:
        """Mesh axes that split the slices of rows (see `slices`); the axes of experts stay last."""
        return (*self.token_axes, *self.row_axes)

    def size(self, axes: tuple[str, ...]) -> int:
        """Return the product of the sizes of mesh axes."""
        return 1 if self.mesh is None else math.prod(self.mesh.shape[axis] for axis in axes)

    def split(self, array: Array, *axes: tuple[str, ...] | None) -> Array:
        """Shard the first dimensions of an array over mesh axes; the other dimensions stay whole."""
        if self.mesh is None:
            return array
        return jax.lax.with_sharding_constraint(array, NamedSharding(self.mesh, PartitionSpec(*axes)))

    def split_rows(self, array_RWX: Array) -> Array:
        """Shard the rows, or slices, of an array over the axes that split them.

        Without this constraint the compiler may gather the rows and split the width, instead of gathering each
        layer's weights.
        """
        return self.split(array_RWX, self.slice_axes)

    def slices(self, array_RWX: Array) -> Array:
        """Split rows for the C devices that share their tokens, `[C R, W / C, ...]`; each slice becomes a row."""
        count = self.size(self.token_axes)
        if count == 1:
            return array_RWX
        rows, width, *rest = array_RWX.shape
        array_RCYX = array_RWX.reshape(rows, count, width // count, *rest)
        array_CRYX = self.split(jnp.moveaxis(array_RCYX, 1, 0), self.token_axes, self.row_axes)
        return self.split_rows(array_CRYX.reshape(count * rows, -1, *rest))

    def joined(self, array_SYX: Array) -> Array:
        """Join slices into rows, `[R, W, ...]`; the inverse of `slices`."""
        count = self.size(self.token_axes)
        if count == 1:
            return array_SYX
        slices, width, *rest = array_SYX.shape
        array_CRYX = self.split(array_SYX.reshape(count, -1, width, *rest), self.token_axes, self.row_axes)
        array_RWX = jnp.moveaxis(array_CRYX, 0, 1).reshape(slices // count, -1, *rest)
        return self.split(array_RWX, self.row_axes, self.token_axes)

    def on_devices(self, kernel: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
        """Wrap `kernel` so that every device runs it on its own part of the arrays, also inside a pipeline stage."""
        if self.mesh is None:
            return kernel
        manual = set(jax.sharding.get_abstract_mesh().manual_axes)
        left = [axis for axis in self.mesh.axis_names if axis not in manual]

        def rest(spec: PartitionSpec) -> PartitionSpec:
            groups = [(axes,) if isinstance(axes, str) else axes or () for axes in spec]
            return PartitionSpec(*[tuple(axis for axis in axes if axis not in manual) for axes in groups])

        specs = jax.tree.map(rest, (in_specs, out_specs), is_leaf=lambda leaf: isinstance(leaf, PartitionSpec))
        # The check is off, because kernels do not declare over which axes their results vary.
        how = {"in_specs": specs[0], "out_specs": specs[1], "check_vma": False}
        if not manual:
            return jax.shard_map(kernel, mesh=self.mesh, **how)
        return jax.shard_map(kernel, axis_names=set(left), **how)


ONE_DEVICE = Execution()
"""Execution in float32 on one device, with the kernels that every backend supports."""
