"""Weights from one pool to another: other devices, another number of them, another layout.

    splits = splits_of(shardings, shapes)                   # on the target: what its devices need
    offer = exchange.offer(params, splits)                  # in every process of the source pool
    weights, delivery = exchange.take(offers, shardings)    # in every process of the target pool
    waiting, delivery = exchange.fetch(offers, shardings)   # or so, while the target's devices compute

The source casts, gathers and cuts, in one compiled program, until it holds the very blocks that
the target's devices need. Those travel as they are, by one of three carriers:

- `Held`: source and target share a process. From device to device, never through the host.
- `Posted`: they do not. Each process of the target pulls every block that it needs once.
- `Packed`: numpy arrays inside the offer, which travel with the message that carries it. Only
  where that is asked for.

They come in buckets of leaves, one after another. `fetch` moves each bucket on into the target's host memory, from
where `offload.to_device` has the tree on its devices: of them it takes room for one bucket.

`Splits` and `Offer` travel in messages: between processes both are pickled. An offer has a parcel
for each process of the target, and the parcels of all the source's processes together hold each
block that the target's process needs once. Of the devices that hold a block, the one that has
sent least sends it.

Source: HybridFlow (arXiv:2409.19256), section 5.
"""

import itertools
import os
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import Sharding

from jaxrlhf.resharding.blocks import BlockId, Blocks, LeafGrid, as_blocks, block_numbers, grid_of
from jaxrlhf.resharding.offload import Moved, to_host
from jaxrlhf.resharding.parcels import Held, Landed, Packed, Parcel, Posted, Wanted
from jaxrlhf.resharding.wire import Wire

_PROCESS = uuid.uuid4().hex

BUCKET_BYTES = 512 * 2**20
"""Bytes of a device's blocks that travel at once; a leaf of which a device needs more is a bucket of its own."""


@dataclass(frozen=True)
class Splits:
    """Shards of a tree that a target needs. Travels to the source.

    Attributes:
      grids: How each leaf is split, in the order of the tree.
      needs: For each process of the target, by its index there, the blocks that it needs.
      process: Where this was made.
    """

    grids: tuple[LeafGrid, ...]
    needs: tuple[tuple[int, tuple[BlockId, ...]], ...]
    process: str


def splits_of(shardings: Any, shapes: Any) -> Splits:
    """Shards that a target with these shardings needs.

    Args:
      shardings: Tree of shardings over all the target's devices, those of its other processes too.
      shapes: The same tree of shaped arrays, with the dtype that is wanted.
    """
    layout = jax.tree_util.tree_leaves_with_path(shardings)
    pairs = zip(layout, jax.tree.leaves(shapes), strict=True)
    grids = tuple(grid_of(jax.tree_util.keystr(path), sharding, array) for (path, sharding), array in pairs)
    needs: dict[int, set[BlockId]] = {}
    for leaf, (grid, (_, sharding)) in enumerate(zip(grids, layout, strict=True)):
        for device, number in block_numbers(sharding, grid).items():
            needs.setdefault(device.process_index, set()).add(BlockId(leaf, number))
    return Splits(
        grids, tuple((process, tuple(sorted(blocks))) for process, blocks in sorted(needs.items())), _this_process()
    )


@dataclass(frozen=True)
class Offer:
    """Shards that one process of the source has for a target.

    Attributes:
      parcels: For each process of the target, by its index there.
    """

    splits: Splits
    parcels: Mapping[int, Parcel]


class Exchange:
    """One process's end of all its transfers of weights. Costs nothing until it is used.

    Args:
      host: Name or address under which the other hosts reach this one.
      carrier: Way that offered arrays take. `direct` goes from device to device inside a process, and over
        the wire between processes. `host` packs the blocks into the offer.
      limit_s: Most that taking waits for a source.
    """

    def __init__(
        self, host: str = "127.0.0.1", *, carrier: Literal["direct", "host"] = "direct", limit_s: float = 300.0
    ) -> None:
        self._wire = Wire(host)
        self._carrier = carrier
        self._limit_s = limit_s
        self._offers: dict[Splits, list[Offer]] = {}

    def offer(self, tree: Any, splits: Splits, *, keep: bool = True, waiting: int = 1) -> Offer:
        """Have a tree ready in the blocks of a target. Every process of the source calls this.

        What is offered as copies is freed as it is taken; a tree whose copies do not fit beside it can
        be offered and taken part by part. Earlier offers for the same splits are withdrawn, but for the newest.

        Args:
          keep: Whether the tree lives until it is taken. Then leaves that are in the target's dtype and
            grid already are offered as they are; otherwise all are offered as copies.
          waiting: Offers for the same splits that may wait at once, this one included.

        Raises:
          ValueError: The tree is not the one that the target described.
          TransferError: This backend has no transfer server.
        """
        self.withdraw(splits, but=waiting - 1)
        packs = self._carrier == "host"  # which takes copies, and now
        offer = self._offer(as_blocks(_leaves_like(tree, splits), splits.grids, share=keep or packs), splits)
        if not packs:
            self._offers.setdefault(splits, []).append(offer)
        return offer

    def take(self, offers: Sequence[Offer], shardings: Any) -> tuple[Any, Moved]:
        """The tree in the target's layout. Every process of the target calls this.

        Args:
          offers: Offers of every process of the source; an offer can be taken once.
          shardings: Shardings that `splits_of` was given.

        Raises:
          ValueError: The offers are for another layout, lack a block that is needed, or come from
            devices that the target itself uses.
          TransferError: A source failed, or nothing came from it within the limit.
        """
        return self._taken(offers, shardings, lambda leaves: leaves)

    def fetch(self, offers: Sequence[Offer], shardings: Any) -> tuple[Any, Moved]:
        """The tree in the host memory of the target, for `offload.to_device`; errors as of `take`.

        A thread may call this while others have the target's devices compute.
        """
        return self._taken(offers, shardings, lambda leaves: to_host(leaves)[0])

    def withdraw(self, splits: Splits, *, but: int = 0) -> None:
        """Take back what was offered for these splits, but for so many offers that are the newest."""
        offers = self._offers.pop(splits, [])
        gone, kept = (offers[:-but], offers[-but:]) if but else (offers, [])
        for parcel in (parcel for offer in gone for parcel in offer.parcels.values()):
            if isinstance(parcel, Held):
                parcel.release()
            elif isinstance(parcel, Posted):
                for ticket in parcel.tickets:
                    self._wire.withdraw(ticket)
        if kept:
            self._offers[splits] = kept

    def close(self) -> None:
        """Withdraw what was offered and never taken."""
        for splits in list(self._offers):
            self.withdraw(splits)

    def _taken(
        self, offers: Sequence[Offer], shardings: Any, kept: Callable[[list[jax.Array]], list[Any]]
    ) -> tuple[Any, Moved]:
        """The tree as it is kept, bucket after bucket."""
        start, deadline = time.perf_counter(), time.monotonic() + self._limit_s
        layout = _layout(offers, shardings)
        grids = offers[0].splits.grids
        wanted = _wanted(grids, layout)
        parcels = [parcel for offer in offers if (parcel := offer.parcels.get(jax.process_index()))]
        _check_complete(parcels, grids, wanted)
        leaves: list[Any] = []
        received: Counter[jax.Device] = Counter()
        for bucket in _buckets(grids):
            own = {block: devices for block, devices in wanted.items() if block.leaf in bucket}
            landed = self._land(parcels, grids, own, deadline)
            _spread(landed, own)
            for block, device in landed:
                received[device] += grids[block.leaf].block_bytes
            leaves += kept([_assembled(leaf, grids[leaf], layout[leaf], landed) for leaf in bucket])
        for parcel in parcels:
            if isinstance(parcel, Held):
                parcel.release()
        tree = jax.tree.unflatten(jax.tree.structure(shardings), leaves)
        return tree, Moved(max(received.values(), default=0), time.perf_counter() - start)

    def _offer(self, blocks: Blocks, splits: Splits) -> Offer:
        if self._carrier == "direct" and splits.process == _this_process():
            return Offer(splits, {process: Held(blocks) for process, _ in splits.needs})
        served = _served(blocks, splits)
        if self._carrier == "direct":
            # The server alone keeps the blocks alive from here on: what is pulled is free.
            return Offer(splits, {to: self._posted(parts, splits.grids) for to, parts in served})
        # Copies: on CPU, numpy's view of a block would keep its buffer.
        packed = {to: Packed({block: np.array(part) for block, part in parts.items()}) for to, parts in served}
        blocks.free()
        return Offer(splits, packed)

    def _posted(self, parts: Mapping[BlockId, jax.Array], grids: Sequence[LeafGrid]) -> Posted:
        buckets = [[block for block in parts if block.leaf in bucket] for bucket in _buckets(grids)]
        return Posted(
            {self._wire.publish([parts[block] for block in blocks]): tuple(blocks) for blocks in buckets if blocks}
        )

    def _land(self, parcels: Sequence[Parcel], grids: Sequence[LeafGrid], wanted: Wanted, deadline: float) -> Landed:
        """Every block on a device that wants it, at least."""
        each = [parcel.land(wanted, grids, self._wire) for parcel in parcels]
        for parcel, landed in zip(parcels, each, strict=True):
            if isinstance(parcel, Posted):
                self._wire.settle(parcel.address, list(landed.values()), deadline=deadline)
        return {place: array for landed in each for place, array in landed.items()}


def _this_process() -> str:
    """This process, unlike any other on any host."""
    return f"{_PROCESS}/{os.getpid()}"  # a fork has the same modules


def _leaves_like(tree: Any, splits: Splits) -> list[jax.Array]:
    """The tree's leaves, which must be those that the target described."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    paths, expected = [jax.tree_util.keystr(path) for path, _ in leaves], [grid.path for grid in splits.grids]
    if paths != expected:
        odd = sorted(set(paths) ^ set(expected))
        raise ValueError(f"source and target are different trees: {odd[:5]} are in only one of them")
    return [leaf for _, leaf in leaves]


def _served(blocks: Blocks, splits: Splits) -> Iterator[tuple[int, dict[BlockId, jax.Array]]]:
    """For each process of the target the blocks that this process sends it; every process of the source agrees."""
    load: Counter[jax.Device] = Counter()
    for process, needed in splits.needs:
        parts = {}
        for block in needed:
            sender = min(blocks.holders[block], key=lambda device: load[device])
            load[sender] += splits.grids[block.leaf].block_bytes
            if sender in blocks.here.get(block, {}):
                parts[block] = blocks.here[block][sender]
        if parts:
            yield process, parts


def _layout(offers: Sequence[Offer], shardings: Any) -> list[Sharding]:
    """The leaves of the target's shardings, for which all offers must have been made."""
    if not offers:
        raise ValueError("no offers; take needs those of every process of the source pool")
    layout = jax.tree.leaves(shardings)
    for offer in offers:
        grids = offer.splits.grids
        if offer.splits != offers[0].splits or len(layout) != len(grids):
            raise ValueError("the offers are for different splits; make all of them for what splits_of returned here")
        for grid, sharding in zip(grids, layout, strict=True):
            if grid_of(grid.path, sharding, jax.ShapeDtypeStruct(grid.shape, grid.dtype)) != grid:
                raise ValueError(f"{grid.path} was offered in {grid.ways} parts, and {sharding} splits it otherwise")
    return layout


def _wanted(grids: Sequence[LeafGrid], layout: Sequence[Sharding]) -> dict[BlockId, list[jax.Device]]:
    wanted: dict[BlockId, list[jax.Device]] = {}
    for leaf, (grid, sharding) in enumerate(zip(grids, layout, strict=True)):
        for device, number in block_numbers(sharding, grid).items():
            if device in sharding.addressable_devices:
                wanted.setdefault(BlockId(leaf, number), []).append(device)
    return wanted


def _check_complete(parcels: Sequence[Parcel], grids: Sequence[LeafGrid], wanted: Wanted) -> None:
    counts = Counter(block for parcel in parcels for block in parcel.blocks)
    for block in wanted:
        if counts[block] != 1:
            raise ValueError(
                f"a block of {grids[block.leaf].path} is in {counts[block]} of the offers, and must be in one; give "
                "the offers of every process of the source, each once, and take them once"
            )


def _spread(landed: Landed, wanted: Wanted) -> None:
    """Copy each block from the device where it landed to the others of this process that want it."""
    first = {block: array for (block, _), array in landed.items()}
    rest = [(block, device) for block, devices in wanted.items() for device in devices if (block, device) not in landed]
    copies = jax.device_put([first[block] for block, _ in rest], [device for _, device in rest])
    landed.update(zip(rest, jax.block_until_ready(copies), strict=True))


def _assembled(leaf: int, grid: LeafGrid, sharding: Sharding, landed: Landed) -> jax.Array:
    numbers = block_numbers(sharding, grid)
    own = [landed[BlockId(leaf, numbers[device]), device] for device in sharding.addressable_devices]
    return jax.make_array_from_single_device_arrays(grid.shape, sharding, own)


def _buckets(grids: Sequence[LeafGrid]) -> list[range]:
    """Leaves that travel together, the same for source and target."""
    starts, size = [0], 0
    for leaf, grid in enumerate(grids):
        size += grid.block_bytes
        if size > BUCKET_BYTES and leaf > starts[-1]:
            starts.append(leaf)
            size = grid.block_bytes
    return [range(start, stop) for start, stop in itertools.pairwise([*starts, len(grids)])]
