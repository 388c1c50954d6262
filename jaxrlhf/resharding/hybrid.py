"""Hybrid engine: one set of weights, switched between its training and its generation layout.

    weights, switch = hybrid.to_generation(params)    # leaves of params that move are donated
    params, switch = hybrid.to_training(weights, params)

Weights move between devices in compiled programs. If the training layout refines the generation layout, the switch to
generation is an all-gather inside each micro-data-parallel group, and the switch back is a local slice.

No weight is stored twice in one dtype. A leaf that keeps its dtype moves *in place*: it exists in one layout at a time.
A leaf that is cast for generation keeps its master in the training layout, next to the copy; the copy is freed on the
switch back, and the masters can be offloaded meanwhile to save memory. A leaf that neither moves nor is cast is shared.

Source: HybridFlow (arXiv:2409.19256), section 5.
"""

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding, Sharding

from jaxrlhf.resharding.offload import Moved
from jaxrlhf.resharding.relayout import Convert, Leaf, Plan, Step, cast_to, paired, plan, same_structure, ties_of
from jaxrlhf.sharding.described import described
from jaxrlhf.sharding.overlap import refines
from jaxrlhf.sharding.rules import GENERATE, TRAIN, cast_shapes, check_divisible, shardings


class SwitchError(RuntimeError):
    """Switch that stopped half way; the cause is in `__cause__`. No weight is lost.

    Attributes:
      weights: Whole tree, each leaf alive in one of the two layouts. `hybrid.to_training(error.weights, params)`, with
        the `params` that the switch started with, restores the training layout.
    """

    def __init__(self, message: str, weights: Any) -> None:
        super().__init__(message)
        self.weights = weights


class Lowered(NamedTuple):
    """Lowered programs of both directions, in order, to inspect their data movement."""

    to_generation: list[jax.stages.Lowered]
    to_training: list[jax.stages.Lowered]


class HybridEngine:
    """Hybrid engine of a role: switches the role's parameters between the training and the generation layout.

    The trees may be any part of a model's parameters, of mixed dtypes, with `None` for absent parts. An array at two
    paths (tied weights) is one weight: it moves, counts and is freed once, and is at both paths in the result.

    Args:
      trained: Tree of arrays or `jax.ShapeDtypeStruct`s with the training shardings.
      generated: Tree of arrays or `jax.ShapeDtypeStruct`s with the generation shardings, over the same devices in the
        same order.
      bucket_bytes: Bytes per device of a bucket, counting sources and temporaries. A gather writes a new buffer next to
        its source, and XLA may need another buffer to reorder dimensions. So leaves switch a bucket at a time, and each
        bucket's source is freed before the next gather: a switch needs memory for the larger layout, the masters of
        cast leaves and one bucket. A bucket is at least one leaf, with all its layers.
      convert: Function that turns a weight, in its training layout, into the arrays that generation takes; needed if
        more than the dtype changes.

    Attributes:
      masters: Tree of bools: True for a leaf of `params` that is a master, kept but not used during generation.
      donated: Tree of bools like the generation weights: True for a copy that only generation reads.
      refines: Whether every device's training shard is a part of its generation shard.
      generation_bytes_per_device: Bytes of the weights during generation, without masters of cast leaves.
      copy_bytes_per_device: Bytes of cast copies, a part of `generation_bytes_per_device`.
      redundancy_bytes_per_device: Bytes that generation does not need: masters of cast leaves, until they are
        offloaded. Leaves that move in place add nothing.
      bytes_per_device: Bytes that a device receives for generation, the maximum over devices.
      bytes_back_per_device: Bytes that a device receives for training, the maximum over devices; 0 if `refines`.

    Raises:
      ValueError: The two trees differ in structure or shapes, or tied leaves have different layouts.
    """

    def __init__(self, trained: Any, generated: Any, *, bucket_bytes: int = 2**30, convert: Convert = cast_to) -> None:
        if bucket_bytes <= 0:
            raise ValueError(f"bucket_bytes must be above 0, got {bucket_bytes}")
        self._bucket_bytes, self._convert = bucket_bytes, convert
        self._structure = jax.tree.structure(trained)
        self._leaves = paired(trained, generated)
        self._plans: dict[tuple[int, ...], Plan] = {}
        self.train = self._tree([leaf.trained.sharding for leaf in self._leaves])
        self.generate = self._tree([jax.tree.map(lambda x: x.sharding, leaf.generated) for leaf in self._leaves])
        self.generation_shapes = self._tree([leaf.generated for leaf in self._leaves])
        self.masters = self._tree([leaf.cast for leaf in self._leaves])
        self.donated = self._tree(
            [jax.tree.map(lambda _, cast=leaf.cast: cast, leaf.generated) for leaf in self._leaves]
        )
        self.refines = all(
            refines(leaf.trained.sharding, array.sharding, array.shape)
            for leaf in self._leaves
            for array in jax.tree.leaves(leaf.generated)
        )
        ties = ties_of(jax.tree.leaves(trained))
        once = [leaf for place, leaf in enumerate(self._leaves) if ties[place] == place]
        self.train_bytes_per_device = sum(leaf.train_bytes for leaf in once)
        self.generation_bytes_per_device = sum(leaf.generation_bytes for leaf in once)
        self.copy_bytes_per_device = sum(leaf.generation_bytes for leaf in once if leaf.cast)
        way = self._plan(ties)
        self.bytes_per_device, self.bytes_back_per_device = way.bytes_per_device, way.bytes_back_per_device
        self.redundancy_bytes_per_device = way.beside_bytes_per_device

    @classmethod
    def by_rules(
        cls,
        train_mesh: Mesh,
        generation_mesh: Mesh,
        dims: Any,
        shapes: Any,
        *,
        dtype: Any,
        bucket_bytes: int = 2**30,
    ) -> "HybridEngine":
        """Build the engine of the actor's parameters, with layouts from the two rule tables.

        Args:
          shapes: Tree of shaped arrays of the trained parameters.
          dtype: Dtype of the generation weights; norm scales keep their dtype.

        Raises:
          Refusal: A dimension does not split evenly over its axes.
        """
        check_divisible(train_mesh, dims, shapes, TRAIN, role="actor")
        check_divisible(generation_mesh, dims, shapes, GENERATE, role="actor in generation")
        trained = described(shapes, shardings(train_mesh, dims, TRAIN))
        generated = described(cast_shapes(dims, shapes, dtype=dtype), shardings(generation_mesh, dims, GENERATE))
        return cls(trained, generated, bucket_bytes=bucket_bytes)

    def to_generation(self, params: Any) -> tuple[Any, Moved]:
        """Switch parameters to the generation layout and dtype.

        Leaves of `params` that move in place are deleted. Pass `params` back to `to_training`: the tree still holds the
        masters of cast leaves and the shared leaves.

        Raises:
          ValueError: `params` are not the engine's parameters, alive in the training layout.
          SwitchError: A program failed; the error holds the weights.
        """
        start = time.perf_counter()
        leaves = self._flat(params)
        for leaf, array in zip(self._leaves, leaves, strict=True):
            _require(leaf, array, [leaf.trained.sharding])
        ties = ties_of(leaves)
        way = self._plan(ties)
        weights = self._run(way.there, leaves, ties, "generation")
        return weights, Moved(way.bytes_per_device, time.perf_counter() - start)

    def to_training(self, weights: Any, params: Any) -> tuple[Any, Moved]:
        """Switch weights back to the training layout; leaves of `weights` that are not shared are deleted.

        Args:
          weights: Result of `to_generation`, or `weights` of a `SwitchError`.
          params: Parameters that were passed to `to_generation`.

        Raises:
          ValueError: A master or a weight was deleted, or is in neither layout.
          SwitchError: A program failed; the error holds the weights.
        """
        start = time.perf_counter()
        generated, kept = self._flat(weights), self._flat(params)
        leaves = [new if leaf.moves else old for leaf, new, old in zip(self._leaves, generated, kept, strict=True)]
        for leaf, array in zip(self._leaves, leaves, strict=True):
            # After a SwitchError, a weight that moves may not have moved yet.
            _require(
                leaf, array, [leaf.generated.sharding, leaf.trained.sharding] if leaf.moves else [leaf.trained.sharding]
            )
        for leaf, copy, master in zip(self._leaves, generated, kept, strict=True):
            if leaf.cast and copy is not master:
                jax.tree.map(lambda array: array.delete(), copy)
        ties = ties_of(leaves)
        way = self._plan(ties)
        params = self._run(way.back, leaves, ties, "training")
        return params, Moved(way.bytes_back_per_device, time.perf_counter() - start)

    def lower(self) -> Lowered:
        """Lower the programs of both directions, for weights that are not tied."""
        way = self._plan(tuple(range(len(self._leaves))))
        return Lowered(
            [step.program.lower([self._leaves[place].trained for place in step.places]) for step in way.there],
            [step.program.lower([self._leaves[place].generated for place in step.places]) for step in way.back],
        )

    def _run(self, steps: list[Step], leaves: list[Any], ties: tuple[int, ...], layout: str) -> Any:
        """Run the steps in order on the leaves, and free the leaves that each step replaced."""
        done = 0
        try:
            for step in steps:
                # Wait: a failure must surface before the only copy of a weight is deleted.
                moved = jax.block_until_ready(step.program([leaves[place] for place in step.places]))
                for place, new in zip(step.places, moved, strict=True):
                    if place in step.freed:
                        leaves[place].delete()
                    leaves[place] = new
                done += 1
        except Exception as error:
            raise SwitchError(
                f"the switch to the {layout} layout stopped after {done} of {len(steps)} programs: {error}",
                self._tree([leaves[first] for first in ties]),
            ) from error
        return self._tree([leaves[first] for first in ties])

    def _plan(self, ties: tuple[int, ...]) -> Plan:
        """Return the plan for a pattern of ties; a plan is built once, so its programs compile once."""
        if ties not in self._plans:
            self._plans[ties] = plan(self._leaves, ties, bucket_bytes=self._bucket_bytes, convert=self._convert)
        return self._plans[ties]

    def _flat(self, tree: Any) -> list[Any]:
        nodes = same_structure(self._structure, tree)
        if nodes is None:
            structure: Any = jax.tree.structure(tree)
            raise ValueError(f"got a tree of structure {structure}; expected {self._structure}")
        return nodes

    def _tree(self, leaves: Sequence[Any]) -> Any:
        return jax.tree.unflatten(self._structure, leaves)


def _require(leaf: Leaf, array: Any, layouts: Sequence[Sharding]) -> None:
    if not isinstance(array, jax.Array):
        raise ValueError(f"{leaf.path} is a {type(array).__name__}; expected a jax.Array in the training layout")
    if array.is_deleted():
        raise ValueError(f"{leaf.path} was deleted; pass the newest parameters")
    if array.shape != leaf.trained.shape or array.dtype != leaf.trained.dtype:
        raise ValueError(
            f"{leaf.path} is {array.dtype}{array.shape}; expected {leaf.trained.dtype}{leaf.trained.shape}"
        )
    if not any(array.sharding.is_equivalent_to(layout, array.ndim) for layout in layouts):
        raise ValueError(
            f"{leaf.path} has layout {_named(array.sharding)}, expected {_named(layouts[0])}; reshard it first"
        )


def _named(layout: Sharding) -> str:
    if not isinstance(layout, NamedSharding):
        return str(layout)
    axes = " x ".join(f"{axis} {size}" for axis, size in layout.mesh.shape.items() if size > 1)
    return f"{layout.spec} over {axes or 'one device'} in {layout.memory_kind} memory"
