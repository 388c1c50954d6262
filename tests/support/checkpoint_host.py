"""Host of a world for `checkpoint/test_hosts.py`: holds a share of some trees and runs commands of the test."""

import os
import resource
from multiprocessing.connection import Client
from pathlib import Path

os.environ["NPROC"] = "32"  # before JAX starts, see conftest.py
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrlhf import models
from jaxrlhf.checkpoint import TreeItem, convert, load_pretrained

Layout = tuple[tuple[int, ...], dict[str, tuple[str | None, ...]]]
"""Sizes of the mesh axes `x` and `y`, and the axes of some arrays; other arrays are replicated."""


def placed(tree: dict[str, np.ndarray], layout: Layout) -> dict[str, jax.Array]:
    """Place a tree of host arrays on all devices of the world."""
    shape, splits = layout
    mesh = Mesh(np.array(jax.devices()).reshape(shape), ("x", "y"))

    def place(name: str, array: np.ndarray) -> jax.Array:
        sharding = NamedSharding(mesh, PartitionSpec(*splits.get(name, ())))
        return jax.make_array_from_callback(array.shape, sharding, array.__getitem__)

    return {name: place(name, array) for name, array in tree.items()}


class Host:
    """Methods that the test calls by name."""

    def __init__(self) -> None:
        self.trees: dict[str, dict[str, jax.Array]] = {}
        self.items: dict[str, TreeItem] = {}

    def hold(self, name: str, tree: dict[str, np.ndarray], layout: Layout) -> None:
        self.trees[name] = placed(tree, layout)
        self.items[name] = TreeItem(lambda: self.trees[name], lambda tree: self.trees.__setitem__(name, tree))

    def overwrite(self, name: str) -> None:
        """Donate the buffers of the old arrays to new ones, like an update."""
        program = jax.jit(lambda tree: jax.tree.map(lambda x: x * 0 - 1, tree), donate_argnums=0)
        self.trees[name] = jax.block_until_ready(program(self.trees[name]))

    def shards(self, name: str) -> dict[str, list[tuple[tuple[slice, ...], np.ndarray]]]:
        """Return the index of each shard of this host in its array, and the shard's data."""
        return {
            key: [(shard.index, np.asarray(shard.data)) for shard in array.addressable_shards]
            for key, array in self.trees[name].items()
        }

    def limit_files(self, host: int, size: int) -> None:
        """Limit the size in bytes of a host's files, like a full disk; -1 removes the limit."""
        if jax.process_index() == host:
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, -1))

    def convert(self, source: Path, converted: Path, exported: Path) -> None:
        """Convert from Hugging Face to orbax and back, with the matrices sharded over all devices of the world."""
        convert(source, converted)
        config, mesh = models.read_config(converted), Mesh(np.array(jax.devices()), ("x",))

        def place(shape: jax.ShapeDtypeStruct) -> NamedSharding:
            return NamedSharding(mesh, PartitionSpec(*[None] * (len(shape.shape) - 1), "x"))

        layout = jax.tree.map(place, models.param_shapes(config, "lm"))
        params = load_pretrained(converted, config, "lm", layout)
        models.save_params(params, config, exported, dtype="bfloat16", source=source)

    def item(self, name: str, method: str, *directory: Path):
        return getattr(self.items[name], method)(*directory)


def obey(address: str, world_address: str, hosts: int, index: int, devices: int) -> None:
    """Join the world and run commands until the test closes the connection.

    Args:
      address: Where the test listens.
      world_address: Where the hosts of the world meet.
    """
    jax.config.update("jax_num_cpu_devices", devices)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    if hosts > 1:
        jax.distributed.initialize(world_address, num_processes=hosts, process_id=index)
    host = Host()
    with Client(address, "AF_UNIX") as test:
        test.send((world_address, index))
        while True:
            try:
                method, arguments = test.recv()
            except EOFError:
                os._exit(0)  # a farewell to hosts that may be dead takes minutes
            try:
                test.send((True, getattr(host, method)(*arguments)))
            except Exception as error:
                test.send((False, error))
