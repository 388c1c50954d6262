"""The hybrid engine: one set of weights, switched between its training and generation layout.

    weights, switch = hybrid.to_generation(params)    # params are spent
    params, switch = hybrid.to_training(weights, params)

All that moves, moves in compiled programs, between devices. Where training refines
generation, those are an all-gather inside each micro-data-parallel group on the way there
and a local slice on the way back.

In one dtype no weight is held twice. A leaf whose dtype stays moves *in place*: it exists in
one layout at a time. A leaf that is cast for generation leaves its master where it is, beside
the copy, which is freed on the way back; who needs the room meanwhile can offload the masters.
A leaf that neither moves nor is cast is shared.

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
    """A switch that stopped half way, with its cause in `__cause__`. No weight is lost.

    Attributes:
      weights: The whole tree, each leaf alive in one layout or the other.
        `hybrid.to_training(error.weights, params)`, with the `params` that the switch began
        with, puts them back.
    """

    def __init__(self, message: str, weights: Any) -> None:
        super().__init__(message)
        self.weights = weights


class Lowered(NamedTuple):
    """The programs of both directions, in order, for inspection of what they move."""

    to_generation: list[jax.stages.Lowered]
    to_training: list[jax.stages.Lowered]


class HybridEngine:
    """Switches one role's parameters between its two layouts.

    The trees may be any part of a model's parameters, of mixed dtypes, with `None` where a
    part is absent. An array that stands at two paths (tied weights) is one weight: it moves,
    counts and is freed once, and stands at both paths in the result.

    Args:
      trained: Tree of arrays or `jax.ShapeDtypeStruct`s with the training shardings.
      generated: The same for generation; both over the same devices in the same order.
      bucket_bytes: Per device. A gather writes a new buffer beside its source, and XLA may need another
        for the order of its dimensions. So leaves switch a bucket at a time, each bucket's source freed
        before the next is gathered: a switch takes the larger layout, the masters of cast leaves and one
        bucket, which counts sources and temporaries. A bucket is at least one leaf, with all its layers.
      convert: Makes of a weight what generation takes, where it lies, if more than its dtype is to change.

    Attributes:
      masters: Tree of bools: which leaves of `params` are no part of the weights made of them, and only wait meanwhile.
      spent: Tree like the weights made, of bools: which of them nobody else reads.
      refines: Whether every device's training shard is a part of its generation shard.
      generation_bytes_per_device: Bytes of the weights while generating, without masters of cast leaves.
      copy_bytes_per_device: The part of them that are casts, beside masters that stay.
      redundancy_bytes_per_device: What generation does not need: masters beside their casts, until they are
        offloaded. None of what moves in place.
      bytes_per_device: Most bytes that a device has to receive for generation.
      bytes_back_per_device: Most bytes that a device has to receive for training; 0 where it refines.

    Raises:
      ValueError: The two trees differ in structure or shapes, or tied leaves part ways.
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
        self.spent = self._tree([jax.tree.map(lambda _, cast=leaf.cast: cast, leaf.generated) for leaf in self._leaves])
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
        """The engine of the actor's parameters that the two rule tables lay out.

        Args:
          shapes: Tree of shaped arrays of the parameters, as trained.
          dtype: Dtype of the generation weights; norm scales keep their own.

        Raises:
          Refusal: A dimension does not split evenly over its axes.
        """
        check_divisible(train_mesh, dims, shapes, TRAIN, role="actor")
        check_divisible(generation_mesh, dims, shapes, GENERATE, role="actor in generation")
        trained = described(shapes, shardings(train_mesh, dims, TRAIN))
        generated = described(cast_shapes(dims, shapes, dtype=dtype), shardings(generation_mesh, dims, GENERATE))
        return cls(trained, generated, bucket_bytes=bucket_bytes)

    def to_generation(self, params: Any) -> tuple[Any, Moved]:
        """The weights in the generation layout and dtype.

        Leaves of `params` that move in place are deleted. Hand the tree back to
        `to_training`: it still holds the masters of cast leaves and those that are shared.

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
        """The parameters in the training layout; what `weights` does not share with them is deleted.

        Args:
          weights: From `to_generation`, or those of a `SwitchError`.
          params: What `to_generation` was given.

        Raises:
          ValueError: A master or a weight that has been deleted, or is in neither layout.
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
        """The programs of both directions, of weights that are not tied."""
        way = self._plan(tuple(range(len(self._leaves))))
        return Lowered(
            [step.program.lower([self._leaves[place].trained for place in step.places]) for step in way.there],
            [step.program.lower([self._leaves[place].generated for place in step.places]) for step in way.back],
        )

    def _run(self, steps: list[Step], leaves: list[Any], ties: tuple[int, ...], layout: str) -> Any:
        """Run one step after another on the leaves, freeing what each has replaced."""
        done = 0
        try:
            for step in steps:
                # Wait: a failure has to show before the only copy of a weight is deleted.
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
        """Made, and its programs compiled, once for each pattern of ties."""
        if ties not in self._plans:
            self._plans[ties] = plan(self._leaves, ties, bucket_bytes=self._bucket_bytes, convert=self._convert)
        return self._plans[ties]

    def _flat(self, tree: Any) -> list[Any]:
        nodes = same_structure(self._structure, tree)
        if nodes is None:
            structure: Any = jax.tree.structure(tree)
            raise ValueError(f"a tree of another structure: {structure}; expected {self._structure}")
        return nodes

    def _tree(self, leaves: Sequence[Any]) -> Any:
        return jax.tree.unflatten(self._structure, leaves)


def _require(leaf: Leaf, array: Any, layouts: Sequence[Sharding]) -> None:
    if not isinstance(array, jax.Array):
        raise ValueError(f"{leaf.path} is a {type(array).__name__}; expected a jax.Array in the training layout")
    if array.is_deleted():
        raise ValueError(f"{leaf.path} was deleted, so there is nothing to switch; pass the newest parameters")
    if array.shape != leaf.trained.shape or array.dtype != leaf.trained.dtype:
        raise ValueError(
            f"{leaf.path} is {array.dtype}{array.shape}; expected {leaf.trained.dtype}{leaf.trained.shape}"
        )
    if not any(array.sharding.is_equivalent_to(layout, array.ndim) for layout in layouts):
        raise ValueError(
            f"{leaf.path} is laid out as {_named(array.sharding)}; expected {_named(layouts[0])}; put it there first"
        )


def _named(layout: Sharding) -> str:
    if not isinstance(layout, NamedSharding):
        return str(layout)
    axes = " x ".join(f"{axis} {size}" for axis, size in layout.mesh.shape.items() if size > 1)
    return f"{layout.spec} over {axes or 'one device'} in {layout.memory_kind} memory"
