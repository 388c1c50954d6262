"""Pipeline parallelism: each stage holds consecutive layers and runs only these layers.

Arrays that are divided over stages have one stage after another along their first dimension, which is split over the
stage axes. Stacked parameters therefore have `L / stages` layers on each stage. Inside `jax.shard_map` over these
axes a stage sees its own part in its ordinary shape, so the code of a layer does not depend on stages. All other
mesh axes are left to the compiler.

Source: Huang et al. 2019 (GPipe, arXiv:1811.06965), section 2.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from jaxrlhf.batch import Array


@dataclass(frozen=True)
class Pipeline:
    """Pipeline stages, in the order of their index over `axes`. Build it with `pipeline_over`.

    Attributes:
      mesh: Mesh with auto axes.
      axes: Mesh axes that divide the layers.
      row_axes: Mesh axes that split rows (or slots).
      weight_axes: Last axes of `row_axes`, which also split each layer's weights. Over the other row axes weights are
        whole, and their gradient is summed once instead of for every microbatch.
    """

    mesh: Mesh | AbstractMesh
    axes: tuple[str, ...]
    row_axes: tuple[str, ...]
    weight_axes: tuple[str, ...] = ()

    @property
    def stages(self) -> int:
        """Number of pipeline stages."""
        return self.size(self.axes)

    @property
    def replica_axes(self) -> tuple[str, ...]:
        """Mesh axes that split rows only."""
        return tuple(axis for axis in self.row_axes if axis not in self.weight_axes)

    def size(self, axes: tuple[str, ...]) -> int:
        """Return the product of the sizes of mesh axes."""
        return math.prod(self.mesh.shape[axis] for axis in axes)

    def microbatches(self, rows: int) -> int:
        """Return the number of microbatches of `rows`: the most, up to four per stage, that divide each device's rows.

        A stage idles for (stages - 1) / (microbatches + stages - 1) of the time.

        Raises:
          ValueError: The rows do not split evenly over `row_axes`.
        """
        ways = self.size(self.row_axes)
        if rows % ways:
            axes = " x ".join(axis for axis in self.row_axes if self.mesh.shape[axis] > 1)
            raise ValueError(f"{rows} rows do not split {ways} ways over mesh axes {axes}; use a multiple of {ways}")
        return pipeline_parts(rows // ways, stages=self.stages)

    def on_stages(self, function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
        """Wrap `function` so that every stage runs it on its part; axes outside the specs are left to the compiler."""
        named = {axis for spec in jax.tree.leaves((in_specs, out_specs)) for axis in jax.tree.leaves(tuple(spec))}
        axes = named | set(self.axes)
        # The check is off, because kernels do not declare over which axes their results vary. All differentiated
        # arrays are split over all of these axes, so no gradient has to be summed over any of them.
        return jax.shard_map(
            function, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, axis_names=axes, check_vma=False
        )

    def to_next(self, array: Array) -> Array:
        """Send every stage's array to the next stage; the first stage gets zeros."""
        return lax.ppermute(array, self.axes, [(stage, stage + 1) for stage in range(self.stages - 1)])

    def only_last(self, array: Array) -> Array:
        """Return the last stage's array, and zeros on the other stages, with a leading dimension for the stages."""
        last = lax.axis_index(self.axes) == self.stages - 1
        return jnp.where(last, array, jnp.zeros((), array.dtype))[None]


def pipeline_over(
    mesh: Mesh | AbstractMesh, axes: tuple[str, ...], *, row_axes: tuple[str, ...], weight_axes: tuple[str, ...] = ()
) -> Pipeline | None:
    """Return the pipeline whose stages are the devices along `axes`; None if there is only one stage.

    Raises:
      ValueError: The mesh lacks one of the axes, or `row_axes` do not end with `weight_axes`.
    """
    unknown = [axis for axis in (*axes, *row_axes) if axis not in mesh.shape]
    if unknown:
        raise ValueError(f"the mesh has no axis {', '.join(unknown)}; its axes are {', '.join(mesh.axis_names)}")
    if row_axes[len(row_axes) - len(weight_axes) :] != weight_axes:
        raise ValueError(f"row_axes={row_axes} must end with weight_axes={weight_axes}; change their order")
    pipeline = Pipeline(mesh, axes, row_axes, weight_axes)
    return pipeline if pipeline.stages > 1 else None


def pipeline_forward(
    pipeline: Pipeline | None,
    stack: Callable[[Any, Array, Any], tuple[Array, Any]],
    layers: Any,
    hidden_RWD: Array,
    rows: Any,
) -> tuple[Array, Any]:
    """Run stacked layers over rows, one microbatch after another through the stages.

    At tick t, stage s computes microbatch t - s and sends it to the next stage. Weights that `weight_axes` split are
    gathered at every tick.

    Args:
      stack: Function `(layers, hidden_RWD, rows) -> (hidden_RWD, extra)` for any number of layers and rows; leaves of
        `extra` are `[layers, rows, ...]`.
      layers: Tree of arrays stacked on the first dimension, which the stages divide evenly.
      rows: Tree of `[R, ...]` arrays that are not differentiated.
    """
    if pipeline is None:
        return stack(layers, hidden_RWD, rows)
    stages, replicas = pipeline.stages, pipeline.size(pipeline.replica_axes)
    count = pipeline.microbatches(len(hidden_RWD))

    def on_stage(layers, hidden_1RMWD, rows_RM):
        stage = lax.axis_index(pipeline.axes)
        layers = jax.tree.map(lambda leaf: leaf[0], layers)
        fed_MRWD = jnp.moveaxis(hidden_1RMWD[0], 1, 0)
        fed_MRWD = jnp.pad(fed_MRWD, ((0, stages - 1), (0, 0), (0, 0), (0, 0)))

        def tick(received_RWD, now):
            index, fed_RWD = now
            # Before its first microbatch and after its last one, a stage computes results that are not used.
            microbatch = jnp.clip(index - stage, 0, count - 1)
            stage_rows = jax.tree.map(
                lambda leaf: lax.dynamic_index_in_dim(leaf, microbatch, 1, keepdims=False), rows_RM
            )
            hidden_RWD = jnp.where(stage == 0, fed_RWD, received_RWD)
            hidden_RWD = lax.with_sharding_constraint(hidden_RWD, PartitionSpec(pipeline.weight_axes))
            done_RWD, extra = stack(layers, hidden_RWD, stage_rows)
            return pipeline.to_next(done_RWD), (done_RWD, extra)

        _, (done_MRWD, extra) = lax.scan(tick, fed_MRWD[0], (jnp.arange(count + stages - 1), fed_MRWD))
        extra = jax.tree.map(lambda leaf: _join(lax.dynamic_slice_in_dim(leaf, stage, count), dim=2), extra)
        return pipeline.only_last(_join(done_MRWD[stages - 1 :], dim=1)), extra

    stage_axes, row_axes = pipeline.axes, pipeline.replica_axes
    of_layers, of_rows = PartitionSpec(row_axes, stage_axes), PartitionSpec(row_axes)
    both = PartitionSpec(stage_axes, row_axes)
    run = pipeline.on_stages(on_stage, (of_layers, both, of_rows), (both, both))
    # One copy of the layers per replica, none of them moved: gradients are summed over replicas once, after all ticks.
    layers = jax.tree.map(lambda leaf: _copies(leaf, replicas), layers)
    # A microbatch takes every count-th row, so that each device's share of the microbatch is among its own rows.
    hidden_RMWD, rows_RM = jax.tree.map(lambda leaf: leaf.reshape(-1, count, *leaf.shape[1:]), (hidden_RWD, rows))
    done, extra = run(layers, _copies(hidden_RMWD, stages), rows_RM)
    return _sum(done), extra


def pipeline_decode(
    pipeline: Pipeline,
    stack: Callable[[Any, Any, Array, Any, Array], tuple[Array, Any]],
    layers: Any,
    state: Any,
    hidden_B1D: Array,
    slots: Any,
) -> tuple[Array, Any]:
    """Run layers that keep a state over one token per slot, one stage after another.

    Stages save memory here, not time: one stage works while the others wait. Groups of slots in turn would keep all
    stages busy. But each group would read the stage's weights again, and would have to be sliced out of the cache at
    every token. Decoding is bound by exactly these reads.

    Args:
      stack: Function `(layers, state, hidden_B1D, slots, working) -> (hidden_B1D, state)`; if `working` is False the
        stage waits and must leave `state` unchanged.
      layers: Layers of all stages.
      state: State of all stages.
      slots: Tree of arrays, the same on every stage.
    """

    def on_stage(layers, state, hidden_1B1D, slots):
        stage = lax.axis_index(pipeline.axes)
        hidden_B1D = hidden_1B1D[0]
        for turn in range(pipeline.stages):
            # Idle stages compute as well: they would wait for the working stage either way, and not every backend can
            # run a branch with collectives on only some devices.
            if turn:
                hidden_B1D = pipeline.to_next(hidden_B1D)
            hidden_B1D, state = stack(layers, state, hidden_B1D, slots, stage == turn)
        return pipeline.only_last(hidden_B1D), state

    by_stage, whole = PartitionSpec(pipeline.axes), PartitionSpec()
    run = pipeline.on_stages(on_stage, (by_stage, by_stage, by_stage, whole), (by_stage, by_stage))
    done, state = run(layers, state, _copies(hidden_B1D, pipeline.stages), slots)
    return _sum(done), state


def _copies(array: Array, count: int) -> Array:
    return jnp.broadcast_to(array, (count, *array.shape))


def _sum(parts: Array) -> Array:
    """Sum the result of `only_last` over the stages, so that it is whole on every stage."""
    # Outside shard_map, because XLA:CPU aborts on bfloat16 sums inside. Only one term is not zero,
    # so the sum is exact in any dtype; `jnp.sum` would send float32.
    return lax.reduce_sum(parts, axes=(0,))


def _join(leaf: Array, *, dim: int) -> Array:
    """Join microbatches `[M, ..., R, ...]` with rows at `dim` into all rows in their original order."""
    before, after = leaf.shape[1:dim], leaf.shape[dim + 1 :]
    return jnp.moveaxis(leaf, 0, dim).reshape(*before, -1, *after)


PIPELINE_PARTS_PER_STAGE = 4
"""Most microbatches per stage. More would shorten an idle time that is already below a fifth, with matrices too small
to be fast."""


def pipeline_parts(rows: int, *, stages: int, per_stage: int = PIPELINE_PARTS_PER_STAGE) -> int:
    """Return the number of microbatches of `rows` rows: the most, up to `per_stage` per stage, that divide evenly."""
    return next(count for count in range(min(rows, per_stage * stages), 0, -1) if rows % count == 0)
