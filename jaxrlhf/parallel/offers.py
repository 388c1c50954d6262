"""What a target asks of a source, and what a source has for it.

`Splits` travels to the source and `Offer` back, each in a message: between processes both are
pickled. An offer has a parcel for each process of the target, and the parcels of all the source's
processes together hold each block that the target's process needs once.
"""

import os
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from jaxrlhf.parallel.blocks import BlockId, Blocks, LeafGrid, block_numbers, grid_of
from jaxrlhf.parallel.wire import Ticket, Wire

_PROCESS = uuid.uuid4().hex

Wanted = Mapping[BlockId, Sequence[jax.Device]]
"""For each block that this process needs, the devices that need it."""

Landed = dict[tuple[BlockId, jax.Device], jax.Array]
"""Blocks on devices of the target."""


@dataclass(frozen=True)
class Splits:
    """What a target needs of a tree. Travels to the source.

    Attributes:
      grids: How each leaf is split, in the order of the tree.
      needs: For each process of the target, by its index there, the blocks that it needs.
      process: Where this was made.
    """

    grids: tuple[LeafGrid, ...]
    needs: tuple[tuple[int, tuple[BlockId, ...]], ...]
    process: str


def splits_of(shardings: Any, shapes: Any) -> Splits:
    """What a target with these shardings needs.

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
        grids, tuple((process, tuple(sorted(blocks))) for process, blocks in sorted(needs.items())), this_process()
    )


class Held:
    """Blocks for a target in the same process: the arrays themselves, each as often as the source holds it."""

    def __init__(self, blocks: Blocks) -> None:
        self._blocks = blocks

    @property
    def blocks(self) -> tuple[BlockId, ...]:
        return tuple(self._blocks.here)

    def land(self, wanted: Wanted, grids: Sequence[LeafGrid], _: Wire) -> Landed:
        """The blocks on every device that wants them; what existed for the offer only is freed."""
        load: Counter[jax.Device] = Counter()
        arrays, places = [], []
        for block, targets in wanted.items():
            for target in targets:
                array = min(self._blocks.here[block].values(), key=lambda copy: load[copy.device])
                load[array.device] += grids[block.leaf].block_bytes
                arrays.append(array)
                places.append((block, target))
        if shared := set(load) & {target for _, target in places}:
            raise ValueError(
                f"source and target share devices {sorted(shared, key=lambda device: device.id)}; a transfer is "
                "between disjoint pools, and inside one pool the HybridEngine switches layouts"
            )
        landed = jax.block_until_ready(jax.device_put(arrays, [target for _, target in places]))
        self.release()
        return dict(zip(places, landed, strict=True))

    def release(self) -> None:
        """Free what exists for the offer only, and let go of the rest."""
        self._blocks.free()
        self._blocks = Blocks({}, {}, [])

    def __reduce__(self) -> Any:
        # Pickling would take the arrays through host memory without a word.
        raise TypeError(
            "an offer to a target in this process cannot leave it; for a target in another process, call "
            "splits_of there"
        )


@dataclass(frozen=True)
class Posted:
    """Blocks for one process of the target, to be pulled from a process of the source, in this order."""

    blocks: tuple[BlockId, ...]
    ticket: Ticket

    def land(self, wanted: Wanted, grids: Sequence[LeafGrid], wire: Wire) -> Landed:
        """The blocks on their way to one device each, in turns."""
        places = [(block, wanted[block][turn % len(wanted[block])]) for turn, block in enumerate(self.blocks)]
        shapes = [
            jax.ShapeDtypeStruct(grid.block_shape, grid.dtype, sharding=SingleDeviceSharding(device))
            for grid, device in ((grids[block.leaf], device) for block, device in places)
        ]
        return dict(zip(places, wire.pull(self.ticket, shapes), strict=True))


@dataclass(frozen=True)
class Packed:
    """Blocks for one process of the target, in the memory of the host."""

    arrays: Mapping[BlockId, np.ndarray]

    @property
    def blocks(self) -> tuple[BlockId, ...]:
        return tuple(self.arrays)

    def land(self, wanted: Wanted, _: Sequence[LeafGrid], __: Wire) -> Landed:
        """The blocks on one device each, in turns."""
        places = [(block, wanted[block][turn % len(wanted[block])]) for turn, block in enumerate(self.arrays)]
        # Not aliased: the numpy arrays may be pages of a store that wants them back.
        landed = jax.device_put(list(self.arrays.values()), [device for _, device in places], may_alias=False)
        return dict(zip(places, jax.block_until_ready(landed), strict=True))


Parcel = Held | Posted | Packed


@dataclass(frozen=True)
class Offer:
    """What one process of the source has for a target.

    Attributes:
      splits: What was asked for.
      carrier: How it travels: `device`, `wire` or `host`.
      parcels: For each process of the target, by its index there.
    """

    splits: Splits
    carrier: str
    parcels: Mapping[int, Parcel]


def this_process() -> str:
    """This process, unlike any other on any host."""
    return f"{_PROCESS}/{os.getpid()}"  # a fork has the same modules
