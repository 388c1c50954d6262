"""Parcels: blocks of a tree on their way to one process of another pool, by each of the carriers of a transfer."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from jaxrlhf.resharding.blocks import BlockId, Blocks, LeafGrid
from jaxrlhf.resharding.wire import Ticket, Wire

Wanted = Mapping[BlockId, Sequence[jax.Device]]
"""For each block that this process needs, the devices that need it."""

Landed = dict[tuple[BlockId, jax.Device], jax.Array]
"""Blocks on devices of the target."""


class Held:
    """Blocks for a target in the same process: the arrays themselves, each as often as the source holds it."""

    def __init__(self, blocks: Blocks) -> None:
        self._blocks = blocks

    @property
    def blocks(self) -> tuple[BlockId, ...]:
        return tuple(self._blocks.here)

    def land(self, wanted: Wanted, grids: Sequence[LeafGrid], _: Wire) -> Landed:
        """The blocks on every device that wants them."""
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
    """Blocks for one process of the target, to be pulled from a process of the source.

    Attributes:
      tickets: A ticket for each bucket that it has blocks of, with those in the order of the pull.
    """

    tickets: Mapping[Ticket, tuple[BlockId, ...]]

    @property
    def blocks(self) -> tuple[BlockId, ...]:
        return tuple(block for blocks in self.tickets.values() for block in blocks)

    @property
    def address(self) -> str:
        """Transfer server of the source."""
        return next(iter(self.tickets)).address

    def land(self, wanted: Wanted, grids: Sequence[LeafGrid], wire: Wire) -> Landed:
        """The blocks of a bucket on their way to one device each, in turns."""
        landed: Landed = {}
        for ticket, blocks in self.tickets.items():
            if blocks[0] not in wanted:
                continue
            places = [(block, wanted[block][turn % len(wanted[block])]) for turn, block in enumerate(blocks)]
            shapes = [
                jax.ShapeDtypeStruct(grid.block_shape, grid.dtype, sharding=SingleDeviceSharding(device))
                for grid, device in ((grids[block.leaf], device) for block, device in places)
            ]
            landed |= zip(places, wire.pull(ticket, shapes), strict=True)
        return landed


@dataclass(frozen=True)
class Packed:
    """Blocks for one process of the target, in the memory of the host."""

    arrays: Mapping[BlockId, np.ndarray]

    @property
    def blocks(self) -> tuple[BlockId, ...]:
        return tuple(self.arrays)

    def land(self, wanted: Wanted, _: Sequence[LeafGrid], __: Wire) -> Landed:
        """The blocks that are wanted on one device each, in turns."""
        here = [block for block in self.arrays if block in wanted]
        places = [(block, wanted[block][turn % len(wanted[block])]) for turn, block in enumerate(here)]
        # Copied: the numpy arrays may be pages of a store that wants them back.
        landed = copied_to([self.arrays[block] for block in here], [device for _, device in places])
        return dict(zip(places, landed, strict=True))


def copied_to(blocks: Sequence[np.ndarray], devices: Sequence[jax.Device]) -> list[jax.Array]:
    """Each block in its device's memory, sharing none with the host's or with another device."""
    # On CPU, JAX takes a numpy array that is well aligned for the device's buffer, whatever `may_alias` says.
    own = [np.array(x) if device.platform == "cpu" else x for x, device in zip(blocks, devices, strict=True)]
    return jax.block_until_ready(jax.device_put(own, list(devices)))


Parcel = Held | Posted | Packed
