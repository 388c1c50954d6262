"""A process with devices of its own that offers and takes weights as it is told over its pipes.

`transfer_peer.py DEVICES [COORDINATOR COUNT RANK]`: a pool of one process, or one of several.
"""

import os
import pickle
import sys
import traceback
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxrlhf.resharding import transfer
from jaxrlhf.resharding.transfer import Exchange, Offer, Splits, splits_of

Spec = tuple[Any, ...]


def values(step: int, *, size: int = 16) -> dict[str, np.ndarray]:
    """Weights, other ones at each step; `size` x 32 x 4 bytes and a little."""
    draw = np.random.default_rng(step)
    return {
        "layers": draw.standard_normal((size, 32)).astype(np.float32),
        "bias": draw.standard_normal(8).astype(jax.numpy.bfloat16),
        "scale": np.array(step, np.float32),
        "table": draw.integers(0, 99, (4, 8)).astype(np.int32),
    }


def mesh_of(*sizes: int, devices: Any = None) -> Mesh:
    """(data, fsdp, tensor) over this pool's devices."""
    devices = jax.devices() if devices is None else devices
    return Mesh(np.asarray(devices).reshape(sizes), ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)


def placed(mesh: Mesh, specs: dict[str, Spec]) -> dict[str, NamedSharding]:
    return {name: NamedSharding(mesh, PartitionSpec(*spec)) for name, spec in specs.items()}


TRAINED: dict[str, Spec] = {
    "layers": ("fsdp", "tensor"),
    "bias": (("fsdp", "tensor"),),
    "scale": (),
    "table": ("fsdp",),
}
GENERATED: dict[str, Spec] = {"layers": (None, "tensor"), "bias": (), "scale": (), "table": (None, "tensor")}


def in_place(tree: dict[str, jax.Array], expected: dict[str, np.ndarray]) -> bool:
    """Return whether every shard of this process has the expected bits."""
    return all(
        np.asarray(shard.data).tobytes() == np.ascontiguousarray(expected[name][shard.index]).tobytes()
        for name, array in tree.items()
        for shard in array.addressable_shards
    )


class Peer:
    """Process that offers and receives weights as it is told."""

    def __init__(self) -> None:
        self.reach_at("127.0.0.1")
        self.target: dict[str, NamedSharding] = {}
        self.tree: Any = None

    def reach_at(self, host: str) -> None:
        self.exchanges = {carrier: Exchange(host, carrier=carrier, limit_s=30.0) for carrier in ("direct", "host")}

    def make(self, sizes: tuple[int, ...], step: int, size: int) -> None:
        """Hold the weights of a step in the training layout."""
        layout, arrays = placed(mesh_of(*sizes), TRAINED), values(step, size=size)
        self.tree = {
            name: jax.make_array_from_callback(arrays[name].shape, layout[name], arrays[name].__getitem__)
            for name in layout
        }

    def make_as_wanted(self, step: int) -> None:
        """Hold them in a layout that a target of as many devices wants."""
        self.tree = jax.device_put(values(step), placed(mesh_of(1, 1, 4), GENERATED))

    def delete(self) -> None:
        for array in self.tree.values():
            array.delete()

    def want(self, sizes: tuple[int, ...]) -> Splits:
        self.target = placed(mesh_of(*sizes), GENERATED)
        return splits_of(self.target, values(0))

    def offer(self, splits: Splits, carrier: str, keep: bool = True) -> Offer:
        return self.exchanges[carrier].offer(self.tree, splits, keep=keep)

    def bucket(self, size: int) -> None:
        transfer.BUCKET_BYTES = size

    def take(self, offers: list[Offer], step: int) -> tuple[bool, int]:
        tree, delivery = self.exchanges["direct"].take(offers, self.target)
        return in_place(tree, values(step)), delivery.bytes_per_device

    def resident_bytes(self) -> int:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * 4096


def main() -> None:
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print must not get between the replies
    jax.config.update("jax_num_cpu_devices", int(sys.argv[1]))
    if len(sys.argv) > 2:
        jax.distributed.initialize(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
    peer = Peer()
    while True:
        try:
            verb, arguments = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            reply = getattr(peer, verb)(*arguments)
        except Exception as error:  # for the test to judge
            traceback.print_exc()
            reply = error
        pickle.dump(reply, replies)
        replies.flush()


if __name__ == "__main__":
    main()
