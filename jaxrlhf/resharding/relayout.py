"""Compiled steps that convert a tree of weights from one layout to another, and the bytes that they move."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Sharding

from jaxrlhf.sharding.described import described
from jaxrlhf.sharding.overlap import missing_bytes
from jaxrlhf.sharding.rules import shard_bytes

Convert = Callable[[jax.Array, Any], Any]
"""Function that converts a weight into generation arrays: takes the weight and their shapes with shardings."""


def cast_to(leaf: jax.Array, target: Any) -> Any:
    """Cast a weight to the dtype of its generation target."""
    return leaf.astype(target.dtype)


class Leaf(NamedTuple):
    """Weight with its shape, dtype and sharding in each layout.

    Attributes:
      generated: Shape with sharding; a tree if generation takes several arrays of the weight, such as a quantized
        weight. The tree has the shape of the weight as its `shape`.
    """

    path: str
    trained: jax.ShapeDtypeStruct
    generated: Any

    @property
    def cast(self) -> bool:
        """True if generation takes a copy of another dtype, and the master is kept."""
        alone = isinstance(self.generated, jax.ShapeDtypeStruct)
        return not alone or bool(self.trained.dtype != self.generated.dtype)

    @property
    def moves(self) -> bool:
        """True if the weight moves in place: it exists in one layout at a time."""
        if self.cast:
            return False
        there, here = self.generated.sharding, self.trained.sharding
        return not here.is_equivalent_to(there, len(self.trained.shape))

    @property
    def train_bytes(self) -> int:
        """Bytes per device during training."""
        return shard_bytes(self.trained, self.trained.sharding)

    @property
    def generation_bytes(self) -> int:
        """Bytes per device during generation, without a master."""
        return sum(shard_bytes(array, array.sharding) for array in jax.tree.leaves(self.generated))

    @property
    def passing_bytes(self) -> int:
        """Upper bound of the bytes per device that a step needs for the weight in addition to its target.

        The bound counts the source and XLA's temporaries. An array gathered along another dimension than the first
        arrives out of order in a temporary buffer. An array gathered along two dimensions needs one more buffer.
        """
        return self.train_bytes + 2 * self.generation_bytes


class Step(NamedTuple):
    """Compiled program over some leaves.

    Attributes:
      program: Function from a list of arrays to a list of arrays.
      places: Indices of the program's leaves in the flat tree.
      freed: Indices of the leaves that are freed after the program ran.
    """

    program: Any
    places: list[int]
    freed: frozenset[int]


class Plan(NamedTuple):
    """Steps that switch weights with one pattern of ties to generation and back.

    Attributes:
      there: Steps to the generation layout.
      back: Steps to the training layout.
      bytes_per_device: Bytes that a device receives for generation, the maximum over devices.
      bytes_back_per_device: Bytes that a device receives for training, the maximum over devices.
      beside_bytes_per_device: Bytes of the masters that stay on a device next to the copies for generation.
    """

    there: list[Step]
    back: list[Step]
    bytes_per_device: int
    bytes_back_per_device: int
    beside_bytes_per_device: int


def paired(trained: Any, generated: Any) -> list[Leaf]:
    """Pair the leaves of two trees of arrays, or of shapes with shardings.

    A leaf of `trained` may correspond to several arrays in `generated`.

    Raises:
      ValueError: The trees differ in structure or in shapes.
    """
    news = same_structure(jax.tree.structure(trained), generated)
    if news is None:
        there: Any = jax.tree.structure(generated)
        here: Any = jax.tree.structure(trained)
        raise ValueError(f"the two layouts have different structures: {here} in training, {there} in generation")
    pairs = zip(jax.tree.leaves_with_path(trained), news, strict=True)
    leaves = [Leaf(jax.tree_util.keystr(path), described(old), described(new)) for (path, old), new in pairs]
    for leaf in leaves:
        if leaf.trained.shape != leaf.generated.shape:
            raise ValueError(
                f"{leaf.path} is {leaf.trained.shape} in training and {leaf.generated.shape} in generation"
            )
    return leaves


def same_structure(structure: Any, tree: Any) -> list[Any] | None:
    """Return the nodes of `tree` at the leaves of `structure`; None if a leaf is missing or a plain container."""
    try:
        nodes = structure.flatten_up_to(tree)
    except ValueError:
        return None
    return None if any(isinstance(node, dict | list | tuple | type(None)) for node in nodes) else nodes


def ties_of(leaves: Sequence[Any]) -> tuple[int, ...]:
    """Return for each leaf the index of the first leaf that is the same array. Abstract leaves are never tied."""
    first: dict[Any, int] = {}
    keys = [id(leaf) if isinstance(leaf, jax.Array) else ("shape", place) for place, leaf in enumerate(leaves)]
    return tuple(first.setdefault(key, place) for place, key in enumerate(keys))


def plan(leaves: Sequence[Leaf], ties: tuple[int, ...], *, bucket_bytes: int, convert: Convert) -> Plan:
    """Plan the steps of a switch; a tied weight is moved once.

    Args:
      convert: Function that turns a weight into the arrays that generation takes.
      bucket_bytes: Limit of the bytes per device that a step needs in addition to its target; a step has at least one
        leaf.

    Raises:
      ValueError: Tied leaves have different layouts.
    """
    _require_one_layout(leaves, ties)
    places = [place for place, first in enumerate(ties) if place == first]
    cast = [place for place in places if leaves[place].cast]
    moved = [place for place in places if leaves[place].moves]
    there = [
        _step(
            bucket,
            [leaves[place].generated for place in bucket],
            [leaves[place].trained.sharding for place in bucket],
            freed=[p for p in bucket if leaves[p].moves],
            convert=convert,
        )
        for bucket in _buckets(leaves, moved + cast, bucket_bytes)
    ]
    back = [
        _step(bucket, [leaves[place].trained for place in bucket], freed=bucket)
        for bucket in _buckets(leaves, moved, bucket_bytes)
    ]
    # Masters of cast leaves and shared leaves never left, so only leaves that moved in place come back.
    received = _received([(leaves[place].trained, leaves[place].generated) for place in places])
    received_back = _received([(leaves[place].generated, leaves[place].trained) for place in moved])
    return Plan(there, back, received, received_back, sum(leaves[place].train_bytes for place in cast))


def _step(
    places: list[int],
    targets: list[Any],
    sources: list[Any] | None = None,
    *,
    freed: list[int],
    convert: Convert = cast_to,
) -> Step:
    """Build the step to `targets`; conversion happens in the layouts `sources`, before the move."""

    def relayout(leaves: list[jax.Array]) -> list[Any]:
        # Cast before the gather, so that the gather moves arrays of the target's dtype.
        made = [convert(leaf, target) for leaf, target in zip(leaves, targets, strict=True)]
        if sources is None:
            return made
        several = [not isinstance(target, jax.ShapeDtypeStruct) for target in targets]
        return [
            jax.tree.map(partial(_moved, source), array, target) if parts else array
            for array, target, source, parts in zip(made, targets, sources, several, strict=True)
        ]

    program = jax.jit(relayout, out_shardings=jax.tree.map(lambda target: target.sharding, targets))
    return Step(program, places, frozenset(freed))


def _moved(source: Sharding, array: jax.Array, target: Any) -> jax.Array:
    """Move an array from one layout to the target's; float8 as uint8 bits, because XLA:CPU would gather float16."""
    if not (jnp.issubdtype(array.dtype, jnp.floating) and array.dtype.itemsize == 1):
        return lax.with_sharding_constraint(array, source)
    bits = lax.with_sharding_constraint(lax.bitcast_convert_type(array, jnp.uint8), source)
    return lax.bitcast_convert_type(lax.with_sharding_constraint(bits, target.sharding), array.dtype)


def _buckets(leaves: Sequence[Leaf], places: list[int], bucket_bytes: int) -> Iterator[list[int]]:
    bucket: list[int] = []
    held = 0
    for place in places:
        size = leaves[place].passing_bytes
        if bucket and held + size > bucket_bytes:
            yield bucket
            bucket, held = [], 0
        bucket.append(place)
        held += size
    if bucket:
        yield bucket


def _received(pairs: list[tuple[Any, Any]]) -> int:
    """Return the bytes that a device receives if each pair's first is moved to its second, the maximum over devices."""
    moved = [(source, target) for source, targets in pairs for target in jax.tree.leaves(targets)]
    sources, targets = [source.sharding for source, _ in moved], [target for _, target in moved]
    return missing_bytes(sources, [target.sharding for target in targets], targets)


def _require_one_layout(leaves: Sequence[Leaf], ties: tuple[int, ...]) -> None:
    for leaf, first in zip(leaves, ties, strict=True):
        two = leaf, leaves[first]
        taken = [jax.tree.leaves((each.trained, each.generated)) for each in two]
        for mine, other in zip(*taken, strict=True):
            same = mine.sharding.is_equivalent_to(other.sharding, len(mine.shape))
            if mine.dtype != other.dtype or not same:
                raise ValueError(
                    f"{leaf.path} and {leaves[first].path} are one array with two layouts: {mine.dtype} in "
                    f"{mine.sharding.spec} and {other.dtype} in {other.sharding.spec}; use the same dimension names "
                    "for both"
                )
