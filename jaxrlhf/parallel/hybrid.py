"""The hybrid engine: one set of weights, switched between its training and generation layout.

`to_generation` is one compiled program for the whole tree: cast to the generation dtype,
then gather. When the training layout refines the generation layout, all that the program
moves is an all-gather inside each micro-data-parallel group. The training weights stay
where they are, so going back costs nothing.

Source: HybridFlow (arXiv:2409.19256), section 5.
"""

import time
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jaxrlhf.parallel.rules import GENERATE, TRAIN, shardings


@dataclass(frozen=True)
class Switch:
    """What one switch of layouts cost.

    Attributes:
      bytes_per_device: Most bytes that any device had to receive.
      seconds: Wall-clock time.
    """

    bytes_per_device: int
    seconds: float


def _span(index: tuple[slice, ...], shape: tuple[int, ...]) -> list[tuple[int, int]]:
    return [(s.start or 0, size if s.stop is None else s.stop) for s, size in zip(index, shape, strict=True)]


def _held_elements(
    source: NamedSharding, target: NamedSharding, shape: tuple[int, ...]
) -> dict[jax.Device, tuple[int, int, int]]:
    """Per device: elements in its source shard, in its target shard, and in both."""
    sources = source.devices_indices_map(shape)
    counts = {}
    for device, index in target.devices_indices_map(shape).items():
        old, new = _span(sources[device], shape), _span(index, shape)
        shared = np.prod([max(0, min(b, d) - max(a, c)) for (a, b), (c, d) in zip(old, new, strict=True)], dtype=int)
        sizes = [np.prod([b - a for a, b in span], dtype=int) for span in (old, new)]
        counts[device] = (int(sizes[0]), int(sizes[1]), int(shared))
    return counts


def refines(source: NamedSharding, target: NamedSharding, shape: tuple[int, ...]) -> bool:
    """Whether every device's shard under `source` lies inside its shard under `target`."""
    return all(shared == old for old, _, shared in _held_elements(source, target, shape).values())


def missing_bytes(source: Any, target: Any, shapes: Any) -> int:
    """Most bytes, over devices, of a target shard that the device does not hold yet.

    Args:
      source: Tree of shardings.
      target: Tree of shardings.
      shapes: Tree of shaped arrays, with the dtype that travels.
    """
    totals: dict[jax.Device, int] = {}
    for old, new, array in zip(*map(jax.tree.leaves, (source, target, shapes)), strict=True):
        for device, (_, wanted, shared) in _held_elements(old, new, array.shape).items():
            totals[device] = totals.get(device, 0) + (wanted - shared) * array.dtype.itemsize
    return max(totals.values(), default=0)


def cast_shapes(dims: Any, shapes: Any, *, dtype: Any) -> Any:
    """Shapes of a copy of the parameters in `dtype`.

    Vectors, which are the scales of norms, stay as they are: a model multiplies by them in
    float32, and a rounded scale would give a copy other numbers than its master.
    """

    def one(names: tuple[str | None, ...], array: Any) -> Any:
        matrix = len([name for name in names if name != "layers"]) > 1
        return jax.ShapeDtypeStruct(array.shape, dtype if matrix else array.dtype)

    return jax.tree.map(one, dims, shapes, is_leaf=lambda node: isinstance(node, tuple))


class HybridEngine:
    """Switches one role's parameters between its two layouts.

    Args:
      mesh: The role's factored mesh.
      dims: Tree of dimension names of the parameters.
      shapes: Tree of shaped arrays of the parameters, as trained.
      dtype: Of the generation weights; norm scales keep their own.
    """

    def __init__(self, mesh: Mesh, dims: Any, shapes: Any, *, dtype: Any) -> None:
        self.train = shardings(mesh, dims, TRAIN)
        self.generate = shardings(mesh, dims, GENERATE)
        self._shapes = shapes
        self.generation_shapes = cast_shapes(dims, shapes, dtype=dtype)
        self.bytes_per_device = missing_bytes(self.train, self.generate, self.generation_shapes)
        self.refines = all(
            refines(old, new, array.shape)
            for old, new, array in zip(*map(jax.tree.leaves, (self.train, self.generate, shapes)), strict=True)
        )
        self._moved = jax.tree.map(
            lambda old, new, array, cast: array.dtype != cast.dtype or not old.is_equivalent_to(new, len(array.shape)),
            self.train,
            self.generate,
            shapes,
            self.generation_shapes,
        )
        dtypes = [cast.dtype for cast in self._leaves_moved(self.generation_shapes)]
        self._program = jax.jit(
            lambda leaves: [leaf.astype(dtype) for leaf, dtype in zip(leaves, dtypes, strict=True)],
            out_shardings=self._leaves_moved(self.generate),
        )

    def _leaves_moved(self, tree: Any) -> list[Any]:
        return [leaf for leaf, moved in zip(*map(jax.tree.leaves, (tree, self._moved)), strict=True) if moved]

    def lower(self) -> jax.stages.Lowered:
        """The switch as one lowered program, for inspection of what it moves."""
        trained = jax.tree.map(
            lambda array, sharding: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding),
            self._shapes,
            self.train,
        )
        return self._program.lower(self._leaves_moved(trained))

    def to_generation(self, params: Any) -> tuple[Any, Switch]:
        """The weights in the generation layout and dtype; `params` stay valid.

        Leaves whose layout and dtype coincide are shared with `params`, not copied.
        """
        start = time.perf_counter()
        moved = iter(jax.block_until_ready(self._program(self._leaves_moved(params))))
        weights = jax.tree.map(lambda leaf, flag: next(moved) if flag else leaf, params, self._moved)
        return weights, Switch(self.bytes_per_device, time.perf_counter() - start)

    def to_training(self, weights: Any) -> None:
        """Free the generation copy. Leaves that it shares with the training weights live on."""
        for leaf in self._leaves_moved(weights):
            leaf.delete()
