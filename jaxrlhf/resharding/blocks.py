"""Blocks: arrays in one layout split into the blocks of another layout, on the source's devices.

A layout splits dimension i into `ways[i]` equal parts, so an array is a grid of blocks, numbered row by row, and each
device holds one block. Devices of another pool need blocks of another grid. One compiled program converts a whole tree
from one grid to the other:

- *cast* to the wanted dtype, before anything moves;
- *gather* as little as possible: a dimension stays split over its leading mesh axes while their product divides the
  wanted number of ways;
- *cut* each device's part into blocks, without communication.
"""

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding


class LeafGrid(NamedTuple):
    """Grid of blocks that a leaf is split into for the target.

    Attributes:
      ways: Number of equal parts of each dimension.
    """

    path: str
    shape: tuple[int, ...]
    dtype: np.dtype
    ways: tuple[int, ...]

    @property
    def block_shape(self) -> tuple[int, ...]:
        return tuple(size // ways for size, ways in zip(self.shape, self.ways, strict=True))

    @property
    def block_bytes(self) -> int:
        return math.prod(self.block_shape) * self.dtype.itemsize


class BlockId(NamedTuple):
    """Block of a tree: number of the leaf, and number of the block in the leaf's grid."""

    leaf: int
    number: int


class Blocks(NamedTuple):
    """Tree of arrays, as blocks.

    Attributes:
      holders: Devices of all processes that hold each block.
      here: Blocks on devices of this process: each block as a single-device array, by device.
      made: Arrays made for these blocks. Deleting them frees `here`, except leaves that needed no conversion.
    """

    holders: dict[BlockId, list[jax.Device]]
    here: dict[BlockId, dict[jax.Device, jax.Array]]
    made: list[jax.Array]

    def free(self) -> None:
        """Delete the arrays in `made`."""
        for array in self.made:
            array.delete()


def grid_of(path: str, sharding: Sharding, array: Any) -> LeafGrid:
    """Return the grid into which `sharding` splits an array, or an object with its shape and dtype."""
    shape = tuple(array.shape)
    parts = sharding.shard_shape(shape)
    ways = tuple(size // part if part else 1 for size, part in zip(shape, parts, strict=True))
    return LeafGrid(path, shape, np.dtype(array.dtype), ways)


def block_numbers(sharding: Sharding, grid: LeafGrid) -> dict[jax.Device, int]:
    """Return the number of the block that each device holds under `sharding`."""
    starts = _starts(sharding, grid.shape, grid.block_shape)
    return {device: _number(start, grid.ways) for device, start in starts.items()}


def as_blocks(leaves: Sequence[jax.Array], grids: Sequence[LeafGrid], *, share: bool) -> Blocks:
    """Cast, gather and split leaves into the blocks of the grids, without the host.

    Args:
      share: Whether leaves that already have the right dtype and grid are used directly; else they are copied.

    Raises:
      ValueError: A leaf has another shape than its grid, or is on no mesh.
    """
    plans = [_plan(leaf, grid) for leaf, grid in zip(leaves, grids, strict=True)]
    plans = [plan._replace(fits=plan.fits and share) for plan in plans]
    rest = [leaf for leaf, plan in zip(leaves, plans, strict=True) if not plan.fits]
    program = _program(tuple(plan for plan in plans if not plan.fits))
    made = jax.block_until_ready(program(rest)) if rest else []
    results = iter(made)
    blocks = Blocks({}, {}, [piece for pieces in made for piece in pieces])
    for leaf, (array, plan) in enumerate(zip(leaves, plans, strict=True)):
        for piece, numbers in zip([array] if plan.fits else next(results), _numbers(plan), strict=True):
            here = {shard.device: shard.data for shard in piece.addressable_shards}
            for device, number in numbers.items():
                block = BlockId(leaf, number)
                blocks.holders.setdefault(block, []).append(device)
                if device in here:
                    blocks.here.setdefault(block, {})[device] = here[device]
    return blocks


class _BlockPlan(NamedTuple):
    """Steps that convert one leaf to its grid.

    Attributes:
      sharding: Sharding after the gather.
      cuts: Number of ways that each device's part is then split, for each dimension.
      fits: Whether the leaf has the right dtype and grid already, and is used directly.
    """

    grid: LeafGrid
    sharding: NamedSharding
    cuts: tuple[int, ...]
    fits: bool


def _plan(leaf: jax.Array, grid: LeafGrid) -> _BlockPlan:
    if leaf.shape != grid.shape:
        raise ValueError(f"{grid.path} has shape {leaf.shape} at its source and {grid.shape} at its target")
    if not isinstance(leaf.sharding, NamedSharding):
        raise ValueError(f"{grid.path} has sharding {leaf.sharding}; expected a NamedSharding on its pool's mesh")
    mesh, parts = _prime_mesh(leaf.sharding.mesh)
    spec = []
    for ways, entry in itertools.zip_longest(grid.ways, leaf.sharding.spec):
        axes = () if entry is None else (entry,) if isinstance(entry, str) else entry
        spec.append(_leading([part for axis in axes for part in parts[axis]], mesh, ways))
    gathered = NamedSharding(mesh, PartitionSpec(*spec))
    kept = grid_of(grid.path, gathered, leaf).ways
    cuts = tuple(ways // have for ways, have in zip(grid.ways, kept, strict=True))
    whole = kept == grid.ways and gathered.is_equivalent_to(leaf.sharding, leaf.ndim)
    return _BlockPlan(grid, gathered, cuts, whole and leaf.dtype == grid.dtype)


def _leading(axes: Sequence[str], mesh: Mesh, ways: int) -> tuple[str, ...]:
    """Return the longest prefix of `axes` whose product of sizes divides `ways`."""
    kept, product = [], 1
    for axis in axes:
        product *= mesh.shape[axis]
        if ways % product:
            break
        kept.append(axis)
    return tuple(kept)


@functools.lru_cache(maxsize=16)
def _prime_mesh(mesh: Mesh) -> tuple[Mesh, dict[str, tuple[str, ...]]]:
    """Split each axis of a mesh into its prime factors, with devices in the same order; return also the names by axis.

    With prime factors, four ways can be gathered to two within pairs instead of among all four devices.
    """
    names = {axis: [(f"{axis}.{n}", p) for n, p in enumerate(_primes(size))] for axis, size in mesh.shape.items()}
    parts = [part for factors in names.values() for part in factors]
    devices = mesh.devices.reshape([size for _, size in parts])
    factored = Mesh(devices, tuple(name for name, _ in parts), axis_types=(AxisType.Auto,) * len(parts))
    return factored, {axis: tuple(name for name, _ in factors) for axis, factors in names.items()}


def _primes(size: int) -> Iterator[int]:
    factor = 2
    while size > 1:
        while size % factor == 0:
            yield factor
            size //= factor
        factor += 1


@functools.lru_cache(maxsize=16)
def _program(plans: tuple[_BlockPlan, ...]) -> Any:
    """Compile one program for all leaves; each leaf becomes a list of pieces, one for each way its parts are split."""

    def one(leaf: jax.Array, plan: _BlockPlan) -> list[jax.Array]:
        cast = leaf.astype(plan.grid.dtype)
        if math.prod(plan.cuts) == 1:
            return [jnp.copy(cast)]  # without the copy, an unchanged leaf would be returned itself
        gathered = jax.lax.with_sharding_constraint(cast, plan.sharding)
        cut, spec = functools.partial(_cut, cuts=plan.cuts), plan.sharding.spec
        return jax.shard_map(cut, mesh=plan.sharding.mesh, in_specs=spec, out_specs=spec)(gathered)

    return jax.jit(
        lambda leaves: [one(leaf, plan) for leaf, plan in zip(leaves, plans, strict=True)],
        out_shardings=[[plan.sharding] * math.prod(plan.cuts) for plan in plans],
    )


def _cut(part: jax.Array, *, cuts: tuple[int, ...]) -> list[jax.Array]:
    pieces = [part]
    for dim, ways in enumerate(cuts):
        pieces = [smaller for piece in pieces for smaller in jnp.split(piece, ways, axis=dim)]
    return pieces


def _numbers(plan: _BlockPlan) -> Iterator[dict[jax.Device, int]]:
    """Yield, for each piece in the program's order, the number of the block that each device holds."""
    ways, cuts = plan.grid.ways, plan.cuts
    parts = tuple(size * cut for size, cut in zip(plan.grid.block_shape, cuts, strict=True))
    starts = _starts(plan.sharding, plan.grid.shape, parts)
    for offset in itertools.product(*map(range, cuts)):
        yield {
            device: _number([at * cut + extra for at, cut, extra in zip(start, cuts, offset, strict=True)], ways)
            for device, start in starts.items()
        }


def _starts(sharding: Sharding, shape: tuple[int, ...], part: tuple[int, ...]) -> dict[jax.Device, list[int]]:
    """Return for each device the number of parts of shape `part` before its own part, along each dimension."""
    return {
        device: [(where.start or 0) // (size or 1) for where, size in zip(index, part, strict=True)]
        for device, index in sharding.devices_indices_map(shape).items()
    }


def _number(position: Sequence[int], ways: Sequence[int]) -> int:
    """Return the number of a block in its grid, counted row by row."""
    number = 0
    for at, size in zip(position, ways, strict=True):
        number = number * size + at
    return number
