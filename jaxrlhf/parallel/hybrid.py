"""The hybrid engine: one set of weights, switched between its training and generation layout.

    weights, switch = hybrid.to_generation(params)    # params are spent
    params, switch = hybrid.to_training(weights, params)

All that moves, moves in compiled programs, between devices. Where training refines
generation, those are an all-gather inside each micro-data-parallel group on the way there
and a local slice on the way back.

No weight is held twice. A leaf whose dtype stays moves *in place*: it exists in one layout
at a time. A leaf that is cast for generation leaves its master where it is, and the copy is
freed on the way back. A leaf that neither moves nor is cast is shared.

Source: HybridFlow (arXiv:2409.19256), section 5.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from jaxrlhf.parallel.overlap import missing_bytes, refines
from jaxrlhf.parallel.rules import GENERATE, TRAIN, cast_shapes, check_divisible, laid_out, shard_bytes, shardings


@dataclass(frozen=True)
class Switch:
    """What one switch of layouts cost.

    Attributes:
      bytes_per_device: Most bytes that any device had to receive.
      seconds: Wall-clock time; the first switch of an engine compiles its programs too.
    """

    bytes_per_device: int
    seconds: float


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


class _Leaf(NamedTuple):
    """One weight: shape, dtype and sharding in each layout."""

    path: str
    trained: jax.ShapeDtypeStruct
    generated: jax.ShapeDtypeStruct

    @property
    def cast(self) -> bool:
        return bool(self.trained.dtype != self.generated.dtype)

    @property
    def moves(self) -> bool:
        """Whether it exists in one layout at a time."""
        there, here = self.generated.sharding, self.trained.sharding
        return not self.cast and not here.is_equivalent_to(there, len(self.trained.shape))

    @property
    def bytes_per_device(self) -> int:
        """In the layout that takes more."""
        return max(shard_bytes(layout, layout.sharding) for layout in (self.trained, self.generated))


class _Step(NamedTuple):
    """One compiled program over some leaves, and which of them are freed once it ran."""

    program: Any
    places: list[int]
    freed: frozenset[int]


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
      bucket_bytes: Per device. A gather writes a new buffer beside its source, so leaves that
        move in place do so a bucket at a time, each bucket's source freed before the next is
        gathered: a switch takes the larger layout plus one bucket. A bucket is at least one leaf.

    Attributes:
      train: Tree of the training shardings.
      generate: Tree of the generation shardings.
      generation_shapes: Tree of shapes and dtypes of the generation weights.
      refines: Whether every device's training shard is a part of its generation shard.
      train_bytes_per_device: Of the weights while training.
      generation_bytes_per_device: Of the weights while generating, without masters of cast leaves.
      copy_bytes_per_device: The part of them that are casts, beside masters that stay.
      redundancy_bytes_per_device: Of weights held twice in one dtype while generating: none, in any layout.
      bytes_per_device: Most bytes that a device has to receive for generation.
      bytes_back_per_device: Most bytes that a device has to receive for training; 0 where it refines.

    Raises:
      ValueError: The two trees differ in structure or shapes, or tied leaves part ways.
    """

    redundancy_bytes_per_device = 0

    def __init__(self, trained: Any, generated: Any, *, bucket_bytes: int = 2**30) -> None:
        if bucket_bytes <= 0:
            raise ValueError(f"bucket_bytes must be above 0, got {bucket_bytes}")
        self._bucket_bytes = bucket_bytes
        self._structure = jax.tree.structure(trained)
        self._leaves = _paired(trained, generated)
        self.train = self._tree([leaf.trained.sharding for leaf in self._leaves])
        self.generate = self._tree([leaf.generated.sharding for leaf in self._leaves])
        self.generation_shapes = self._tree([leaf.generated for leaf in self._leaves])
        self.refines = all(
            refines(leaf.trained.sharding, leaf.generated.sharding, leaf.trained.shape) for leaf in self._leaves
        )
        ties = _ties(jax.tree.leaves(trained))
        _require_one_layout(self._leaves, ties)
        weights = self._once(ties)
        self.train_bytes_per_device = sum(shard_bytes(leaf.trained, leaf.trained.sharding) for leaf in weights)
        self.generation_bytes_per_device = sum(shard_bytes(leaf.generated, leaf.generated.sharding) for leaf in weights)
        self.copy_bytes_per_device = sum(
            shard_bytes(leaf.generated, leaf.generated.sharding) for leaf in weights if leaf.cast
        )
        self.bytes_per_device, self.bytes_back_per_device = self._received(ties)
        self._steps: dict[tuple[int, ...], tuple[list[_Step], list[_Step]]] = {}

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
        role: str = "actor",
    ) -> "HybridEngine":
        """The engine of parameters that the two rule tables lay out.

        Args:
          dims: Tree of dimension names of the parameters.
          shapes: Tree of shaped arrays of the parameters, as trained.
          dtype: Of the generation weights; norm scales keep their own.

        Raises:
          ValueError: A dimension does not split evenly over its axes.
        """
        check_divisible(train_mesh, dims, shapes, TRAIN, role=role)
        check_divisible(generation_mesh, dims, shapes, GENERATE, role=f"{role} in generation")
        trained = laid_out(shapes, shardings(train_mesh, dims, TRAIN))
        generated = laid_out(cast_shapes(dims, shapes, dtype=dtype), shardings(generation_mesh, dims, GENERATE))
        return cls(trained, generated, bucket_bytes=bucket_bytes)

    def to_generation(self, params: Any) -> tuple[Any, Switch]:
        """The weights in the generation layout and dtype.

        Leaves of `params` that move in place are deleted. Hand the tree back to
        `to_training`: it still holds the masters of cast leaves and those that are shared.

        Raises:
          ValueError: `params` are not the engine's parameters, alive on the devices.
          SwitchError: A program failed; the error holds the weights.
        """
        start = time.perf_counter()
        leaves = self._flat(params)
        for leaf, array in zip(self._leaves, leaves, strict=True):
            _require_alive(leaf, array)
        ties = _ties(leaves)
        weights = self._run(self._steps_of(ties)[0], leaves, ties, "generation")
        return weights, Switch(self._received(ties)[0], time.perf_counter() - start)

    def to_training(self, weights: Any, params: Any) -> tuple[Any, Switch]:
        """The parameters in the training layout; what `weights` does not share with them is deleted.

        Args:
          weights: From `to_generation`, or those of a `SwitchError`.
          params: What `to_generation` was given.

        Raises:
          ValueError: A master or a weight that has been deleted.
          SwitchError: A program failed; the error holds the weights.
        """
        start = time.perf_counter()
        generated, kept = self._flat(weights), self._flat(params)
        leaves = [new if leaf.moves else old for leaf, new, old in zip(self._leaves, generated, kept, strict=True)]
        for leaf, array in zip(self._leaves, leaves, strict=True):
            _require_alive(leaf, array)
        for leaf, copy, master in zip(self._leaves, generated, kept, strict=True):
            if leaf.cast and copy is not master:
                copy.delete()
        ties = _ties(leaves)
        params = self._run(self._steps_of(ties)[1], leaves, ties, "training")
        return params, Switch(self._received(ties)[1], time.perf_counter() - start)

    def lower(self) -> Lowered:
        """The programs of both directions, of weights that are not tied."""
        there, back = self._steps_of(tuple(range(len(self._leaves))))
        return Lowered(
            [step.program.lower([self._leaves[place].trained for place in step.places]) for step in there],
            [step.program.lower([self._leaves[place].generated for place in step.places]) for step in back],
        )

    def _run(self, steps: list[_Step], leaves: list[jax.Array], ties: tuple[int, ...], layout: str) -> Any:
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

    def _steps_of(self, ties: tuple[int, ...]) -> tuple[list[_Step], list[_Step]]:
        """The steps to generation and those back, built once for each pattern of ties."""
        if ties not in self._steps:
            _require_one_layout(self._leaves, ties)
            places = [place for place, first in enumerate(ties) if place == first]
            cast = [place for place in places if self._leaves[place].cast]
            buckets = list(self._buckets([place for place in places if self._leaves[place].moves]))
            there = [_step(bucket, [self._leaves[p].generated for p in bucket], bucket) for bucket in buckets[:-1]]
            # Casts free nothing, so they run with the last bucket: one program where there is one bucket.
            last = buckets[-1] if buckets else []
            if last or cast:
                there.append(_step(last + cast, [self._leaves[p].generated for p in last + cast], last))
            back = [_step(bucket, [self._leaves[p].trained for p in bucket], bucket) for bucket in buckets]
            self._steps[ties] = there, back
        return self._steps[ties]

    def _buckets(self, places: list[int]) -> Iterator[list[int]]:
        bucket: list[int] = []
        held = 0
        for place in places:
            size = self._leaves[place].bytes_per_device
            if bucket and held + size > self._bucket_bytes:
                yield bucket
                bucket, held = [], 0
            bucket.append(place)
            held += size
        if bucket:
            yield bucket

    def _received(self, ties: tuple[int, ...]) -> tuple[int, int]:
        """Most bytes that a device has to receive, there and back."""
        weights = self._once(ties)
        train, generate = [x.trained.sharding for x in weights], [x.generated.sharding for x in weights]
        there = missing_bytes(train, generate, [x.generated for x in weights])
        # Masters of cast leaves and shared leaves never left.
        moved = [x for x in weights if x.moves]
        train, generate = [x.trained.sharding for x in moved], [x.generated.sharding for x in moved]
        return there, missing_bytes(generate, train, [x.trained for x in moved])

    def _once(self, ties: tuple[int, ...]) -> list[_Leaf]:
        return [leaf for place, leaf in enumerate(self._leaves) if ties[place] == place]

    def _flat(self, tree: Any) -> list[Any]:
        structure: Any = jax.tree.structure(tree)
        if structure != self._structure:
            raise ValueError(f"a tree of another structure: {structure}; expected {self._structure}")
        return jax.tree.leaves(tree)

    def _tree(self, leaves: Sequence[Any]) -> Any:
        return jax.tree.unflatten(self._structure, leaves)


def _paired(trained: Any, generated: Any) -> list[_Leaf]:
    there: Any = jax.tree.structure(generated)
    here: Any = jax.tree.structure(trained)
    if here != there:
        raise ValueError(f"the two layouts differ in structure: {here} in training, {there} in generation")
    pairs = zip(jax.tree.leaves_with_path(trained), jax.tree.leaves(generated), strict=True)
    leaves = [_Leaf(jax.tree_util.keystr(path), _struct(old), _struct(new)) for (path, old), new in pairs]
    for leaf in leaves:
        if leaf.trained.shape != leaf.generated.shape:
            raise ValueError(
                f"{leaf.path} is {leaf.trained.shape} in training and {leaf.generated.shape} in generation"
            )
    return leaves


def _struct(array: Any) -> jax.ShapeDtypeStruct:
    """Shape, dtype and sharding alone, so that the engine keeps no array alive."""
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)


def _step(places: list[int], targets: list[jax.ShapeDtypeStruct], freed: list[int]) -> _Step:
    def relayout(leaves: list[jax.Array]) -> list[jax.Array]:
        return [leaf.astype(target.dtype) for leaf, target in zip(leaves, targets, strict=True)]

    program = jax.jit(relayout, out_shardings=[target.sharding for target in targets])
    return _Step(program, places, frozenset(freed))


def _ties(leaves: Sequence[Any]) -> tuple[int, ...]:
    """For each leaf, the place of the first that is the same array. Shapes alone tie nothing."""
    first: dict[Any, int] = {}
    keys = [id(leaf) if isinstance(leaf, jax.Array) else ("shape", place) for place, leaf in enumerate(leaves)]
    return tuple(first.setdefault(key, place) for place, key in enumerate(keys))


def _require_one_layout(leaves: list[_Leaf], ties: tuple[int, ...]) -> None:
    for leaf, first in zip(leaves, ties, strict=True):
        for mine, other in ((leaf.trained, leaves[first].trained), (leaf.generated, leaves[first].generated)):
            same = mine.sharding.is_equivalent_to(other.sharding, len(mine.shape))
            if mine.dtype != other.dtype or not same:
                raise ValueError(
                    f"{leaf.path} and {leaves[first].path} are one array with two layouts: {mine.dtype} in "
                    f"{mine.sharding.spec} and {other.dtype} in {other.sharding.spec}; name their dimensions alike"
                )


def _require_alive(leaf: _Leaf, array: Any) -> None:
    if not isinstance(array, jax.Array):
        raise ValueError(f"{leaf.path} is a {type(array).__name__}; expected a jax.Array in the training layout")
    if array.is_deleted():
        raise ValueError(f"{leaf.path} was deleted, so there is nothing to switch; pass the newest parameters")
    if array.shape != leaf.trained.shape or array.dtype != leaf.trained.dtype:
        raise ValueError(
            f"{leaf.path} is {array.dtype}{array.shape}; expected {leaf.trained.dtype}{leaf.trained.shape}"
        )
