"""Parcels: blocks of a tree for one process of another pool, with a class for each carrier of a transfer."""

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
"""Devices that need a block, for each block that this process needs."""

Landed = dict[tuple[BlockId, jax.Device], jax.Array]
"""Blocks on devices of the target."""


class Held:
    """Blocks for a target in the same process: the arrays themselves, with every copy that the source holds."""

    def __init__(self, blocks: Blocks) -> None:
        self._blocks = blocks

    @property
    def blocks(self) -> tuple[BlockId, ...]:
        return tuple(self._blocks.here)

    def land(self, wanted: Wanted, grids: Sequence[LeafGrid], _: Wire) -> Landed:
        """Copy the wanted blocks to every device that wants them."""
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
                f"source and target share devices {sorted(shared, key=lambda device: device.id)}, but a transfer "
                "requires disjoint pools; within one pool use HybridEngine"
            )
        landed = jax.block_until_ready(jax.device_put(arrays, [target for _, target in places]))
        return dict(zip(places, landed, strict=True))

    def release(self) -> None:
        """Free arrays that exist only for the offer, and drop references to all others."""
        self._blocks.free()
        self._blocks = Blocks({}, {}, [])

    def __reduce__(self) -> Any:
        # Pickling would silently send the arrays through host memory.
        raise TypeError(
            "an offer to a target in this process cannot be sent to another process; call splits_of in the target's "
            "process"
        )


@dataclass(frozen=True)
class Posted:
    """Blocks for one process of the target, to be pulled from a process of the source.

    Attributes:
      tickets: Blocks of each bucket, in the order of the pull, by the ticket of the bucket.
    """

    tickets: Mapping[Ticket, tuple[BlockId, ...]]

    @property
    def blocks(self) -> tuple[BlockId, ...]:
        return tuple(block for blocks in self.tickets.values() for block in blocks)

    @property
    def address(self) -> str:
        """Address of the source's transfer server."""
        return next(iter(self.tickets)).address

    def land(self, wanted: Wanted, grids: Sequence[LeafGrid], wire: Wire) -> Landed:
        """Start to pull each wanted block to one device; the devices that want a block take turns."""
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
    """Blocks for one process of the target, in host memory."""

    arrays: Mapping[BlockId, np.ndarray]

    @property
    def blocks(self) -> tuple[BlockId, ...]:
        return tuple(self.arrays)

    def land(self, wanted: Wanted, _: Sequence[LeafGrid], __: Wire) -> Landed:
        """Copy each wanted block to one device; the devices that want a block take turns."""
        here = [block for block in self.arrays if block in wanted]
        places = [(block, wanted[block][turn % len(wanted[block])]) for turn, block in enumerate(here)]
        # Copy: the numpy arrays may be pages of a store that reclaims them.
        landed = copied_to([self.arrays[block] for block in here], [device for _, device in places])
        return dict(zip(places, landed, strict=True))


def copied_to(blocks: Sequence[np.ndarray], devices: Sequence[jax.Device]) -> list[jax.Array]:
    """Copy each block to its device; the copies share no memory with the host arrays or with each other."""
    # On CPU, JAX uses a well-aligned numpy array as the device buffer, whatever `may_alias` says.
    own = [np.array(x) if device.platform == "cpu" else x for x, device in zip(blocks, devices, strict=True)]
    return jax.block_until_ready(jax.device_put(own, list(devices)))


Parcel = Held | Posted | Packed
