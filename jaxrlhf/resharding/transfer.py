"""Weight transfer between pools that differ in devices, number of devices, and layout.

    splits = splits_of(shardings, shapes)                   # on the target: what its devices need
    offer = exchange.offer(params, splits)                  # in every process of the source pool
    weights, delivery = exchange.take(offers, shardings)    # in every process of the target pool
    waiting, delivery = exchange.fetch(offers, shardings)   # instead of take, while the target's devices compute

The source casts, gathers and splits weights, in one compiled program, into exactly the blocks that the target's devices
need. Three carriers move the blocks:

- `Held`: source and target share a process. Blocks go from device to device, never through the host.
- `Posted`: source and target are different processes. Each process of the target pulls each block it needs once.
- `Packed`: numpy arrays inside the offer, sent with the offer's message. Only on request (`carrier="host"`).

Blocks move in buckets of leaves, one bucket after another. `fetch` moves each bucket on to the target's host memory, so
it needs device memory for one bucket; `offload.to_device` then moves the tree to the devices.

`Splits` and `Offer` are sent in messages: between processes both are pickled. An offer has a parcel for each process of
the target. The parcels of all source processes together hold each block that a target process needs exactly once. If
several devices hold a block, the device that has sent the fewest bytes sends it.

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
"""Bytes of a bucket per device; a leaf whose block is larger is a bucket by itself."""


@dataclass(frozen=True)
class Splits:
    """Shards of a tree that a target needs; sent to the source.

    Attributes:
      grids: Grid of blocks of each leaf, in the order of the tree.
      needs: Index of each target process, and the blocks that the process needs.
      process: Name of the process that made this object.
    """

    grids: tuple[LeafGrid, ...]
    needs: tuple[tuple[int, tuple[BlockId, ...]], ...]
    process: str


def splits_of(shardings: Any, shapes: Any) -> Splits:
    """Return the shards that a target with these shardings needs.

    Args:
      shardings: Tree of shardings over all devices of the target, including devices of its other processes.
      shapes: Tree of shaped arrays with the same structure, in the wanted dtype.
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
      parcels: Parcel for each process of the target, by the index of the process.
    """

    splits: Splits
    parcels: Mapping[int, Parcel]


class Exchange:
    """Endpoint of one process for all its weight transfers. Costs nothing until it is used.

    Args:
      host: Name or address under which other hosts reach this host.
      carrier: Path of offered arrays. `direct`: from device to device inside a process, over the network between
        processes. `host`: inside the offer, as numpy arrays.
      limit_s: Seconds that `take` and `fetch` wait for a source at most.
    """

    def __init__(
        self, host: str = "127.0.0.1", *, carrier: Literal["direct", "host"] = "direct", limit_s: float = 300.0
    ) -> None:
        self._wire = Wire(host)
        self._carrier = carrier
        self._limit_s = limit_s
        self._offers: dict[Splits, list[Offer]] = {}

    def offer(self, tree: Any, splits: Splits, *, keep: bool = True, waiting: int = 1) -> Offer:
        """Offer a tree, split into the blocks of a target. Every process of the source calls this.

        Offered copies are freed as they are taken. If the copies do not fit in memory next to the tree, offer and take
        the tree part by part. Older offers for the same splits are withdrawn, except the newest `waiting - 1`.

        Args:
          keep: Whether the tree stays alive until the offer is taken. Then leaves that already have the target's dtype
            and grid are offered without a copy; otherwise all leaves are copied.
          waiting: Number of offers for the same splits that may wait at once, including this offer.

        Raises:
          ValueError: The tree differs from the tree that the target described.
          TransferError: This backend has no transfer server.
        """
        self.withdraw(splits, but=waiting - 1)
        packs = self._carrier == "host"  # packing copies the blocks at once
        offer = self._offer(as_blocks(_leaves_like(tree, splits), splits.grids, share=keep or packs), splits)
        if not packs:
            self._offers.setdefault(splits, []).append(offer)
        return offer

    def take(self, offers: Sequence[Offer], shardings: Any) -> tuple[Any, Moved]:
        """Take offers as a tree in the target's layout. Every process of the target calls this.

        Args:
          offers: Offers of every process of the source; an offer can be taken once.
          shardings: Shardings that were passed to `splits_of`.

        Raises:
          ValueError: The offers are for another layout, lack a needed block, or come from devices that the target uses.
          TransferError: A source failed, or sent nothing within the time limit.
        """
        return self._taken(offers, shardings, lambda leaves: leaves)

    def fetch(self, offers: Sequence[Offer], shardings: Any) -> tuple[Any, Moved]:
        """Take offers into the target's host memory, for `offload.to_device`; raises the errors of `take`.

        A thread may call this while other threads compute on the target's devices.
        """
        return self._taken(offers, shardings, lambda leaves: to_host(leaves)[0])

    def withdraw(self, splits: Splits, *, but: int = 0) -> None:
        """Withdraw the offers for these splits, except the newest `but` offers."""
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
        """Withdraw all offers that were not taken."""
        for splits in list(self._offers):
            self.withdraw(splits)

    def _taken(
        self, offers: Sequence[Offer], shardings: Any, kept: Callable[[list[jax.Array]], list[Any]]
    ) -> tuple[Any, Moved]:
        """Take the tree bucket by bucket, passing each bucket's leaves through `kept`."""
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
            # From here on only the server keeps the blocks alive, so pulled blocks are freed.
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
        """Bring every block to at least one of the devices that want it."""
        each = [parcel.land(wanted, grids, self._wire) for parcel in parcels]
        for parcel, landed in zip(parcels, each, strict=True):
            if isinstance(parcel, Posted):
                self._wire.settle(parcel.address, list(landed.values()), deadline=deadline)
        return {place: array for landed in each for place, array in landed.items()}


def _this_process() -> str:
    """Return a name of this process that is unique over all hosts."""
    return f"{_PROCESS}/{os.getpid()}"  # a fork has the same modules


def _leaves_like(tree: Any, splits: Splits) -> list[jax.Array]:
    """Return the leaves of a tree; raise if their paths differ from those the target described."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    paths, expected = [jax.tree_util.keystr(path) for path, _ in leaves], [grid.path for grid in splits.grids]
    if paths != expected:
        odd = sorted(set(paths) ^ set(expected))
        raise ValueError(f"source and target are different trees: {odd[:5]} are in only one of them")
    return [leaf for _, leaf in leaves]


def _served(blocks: Blocks, splits: Splits) -> Iterator[tuple[int, dict[BlockId, jax.Array]]]:
    """Yield the blocks that this process sends to each target process; all source processes agree on the senders."""
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
    """Return the leaves of the target's shardings; raise if an offer was made for other shardings."""
    if not offers:
        raise ValueError("no offers; expected one offer of every process of the source pool")
    layout = jax.tree.leaves(shardings)
    for offer in offers:
        grids = offer.splits.grids
        if offer.splits != offers[0].splits or len(layout) != len(grids):
            raise ValueError(
                "the offers have different splits; make all of them for the splits that splits_of returned here"
            )
        for grid, sharding in zip(grids, layout, strict=True):
            if grid_of(grid.path, sharding, jax.ShapeDtypeStruct(grid.shape, grid.dtype)) != grid:
                raise ValueError(f"{grid.path} was offered in {grid.ways} parts, but {sharding} splits it differently")
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
                f"a block of {grids[block.leaf].path} is in {counts[block]} offers, expected 1; pass one offer of "
                "every source process, and take each offer once"
            )


def _spread(landed: Landed, wanted: Wanted) -> None:
    """Copy each landed block to the other devices of this process that want it."""
    first = {block: array for (block, _), array in landed.items()}
    rest = [(block, device) for block, devices in wanted.items() for device in devices if (block, device) not in landed]
    copies = jax.device_put([first[block] for block, _ in rest], [device for _, device in rest])
    landed.update(zip(rest, jax.block_until_ready(copies), strict=True))


def _assembled(leaf: int, grid: LeafGrid, sharding: Sharding, landed: Landed) -> jax.Array:
    numbers = block_numbers(sharding, grid)
    own = [landed[BlockId(leaf, numbers[device]), device] for device in sharding.addressable_devices]
    return jax.make_array_from_single_device_arrays(grid.shape, sharding, own)


def _buckets(grids: Sequence[LeafGrid]) -> list[range]:
    """Return the buckets, as ranges of leaf numbers; equal on source and target."""
    starts, size = [0], 0
    for leaf, grid in enumerate(grids):
        size += grid.block_bytes
        if size > BUCKET_BYTES and leaf > starts[-1]:
            starts.append(leaf)
            size = grid.block_bytes
    return [range(start, stop) for start, stop in itertools.pairwise([*starts, len(grids)])]
