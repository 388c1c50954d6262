"""Checkpoints of arrays in other processes: worlds of one or several hosts, and a test process without arrays."""

import multiprocessing
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection, Listener

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tiny_checkpoints
import torch
from checkpoint_host import obey, placed
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrlhf.checkpoint import Checkpoints, TreeItem
from jaxrlhf.checkpoint.pretrained import export_converted

pytestmark = pytest.mark.slow

STATE = {"step": 3}
STARTS_S, ANSWERS_S = 120, 60
ROWS_AND_COLUMNS = ((2, 2), {"embed": ("x", "y"), "query": (None, None, "x")})
COLUMNS = ((4, 1), {"embed": (None, "x"), "query": ("y", "x")})
ROWS_TWICE = ((1, 2), {"embed": ("y",)})


class World:
    """Host processes joined by `jax.distributed`.

    Args:
      hosts: Number of hosts.
      devices: Number of devices of each host.
    """

    def __init__(self, hosts: int, devices: int) -> None:
        with socket.socket() as free:
            free.bind(("localhost", 0))
            meeting = f"localhost:{free.getsockname()[1]}"
        # Forks of one process that has imported all; each starts a JAX of its own.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["orbax.checkpoint", "jaxrlhf.models", "jaxrlhf.checkpoint"])
        # Not in tmp_path: addresses have to be short.
        with tempfile.TemporaryDirectory() as folder, Listener(f"{folder}/test", "AF_UNIX") as listener:
            listener._listener._socket.settimeout(STARTS_S)
            self.processes = [
                context.Process(target=obey, args=(listener.address, meeting, hosts, i, devices), daemon=True)
                for i in range(hosts)
            ]
            for process in self.processes:
                process.start()
            connections = {}
            for _ in range(hosts):
                connection = listener.accept()
                _, index = connection.recv()
                connections[index] = connection
        self.connections = [connections[index] for index in range(hosts)]
        self.turn = threading.Lock()

    def call(self, method: str, *arguments: object) -> list:
        """Return the answers of all hosts.

        Raises:
          RuntimeError: A host is dead or does not answer; or whatever is raised there.
        """
        with self.turn:
            asked = [self._ask(connection, method, arguments) for connection in self.connections]
            answers = [
                self._answer(index, connection) if alive else (False, RuntimeError(f"host {index} died"))
                for index, (connection, alive) in enumerate(zip(self.connections, asked, strict=True))
            ]
        for ok, answer in answers:
            if not ok:
                raise answer
        return [answer for _, answer in answers]

    def _ask(self, connection: Connection, method: str, arguments: tuple) -> bool:
        try:
            connection.send((method, arguments))
        except OSError:
            return False
        return True

    def _answer(self, index: int, connection: Connection) -> tuple[bool, object]:
        if not connection.poll(ANSWERS_S):
            return False, RuntimeError(f"host {index} does not answer")
        try:
            return connection.recv()
        except (EOFError, OSError):
            return False, RuntimeError(f"host {index} died")

    def hold(self, name: str, tree: dict, layout: tuple) -> "WorldItem":
        self.call("hold", name, tree, layout)
        return WorldItem(self, name)

    def kill(self, index: int) -> None:
        self.processes[index].kill()
        self.processes[index].join()

    def close(self) -> None:
        for connection in self.connections:
            connection.close()
        for process in self.processes:
            process.kill()
            process.join()


class WorldItem:
    """Item of a tree on the hosts of a world."""

    def __init__(self, world: World, name: str) -> None:
        self.world, self.name = world, name

    def __getattr__(self, method: str):
        return lambda *directory: self.world.call("item", self.name, method, *directory)[0]


class Disturbed:
    """Item that calls a function before one of its methods."""

    def __init__(self, item: WorldItem, method: str, happens: Callable[[], object]) -> None:
        self.item, self.method, self.happens = item, method, happens

    def __getattr__(self, method: str):
        def call(*directory):
            if method == self.method:
                self.happens()
            return getattr(self.item, method)(*directory)

        return call


@pytest.fixture
def start():
    """Function that starts worlds; they are ended at the end."""
    worlds = []

    def start_world(hosts: int, devices: int) -> World:
        worlds.append(World(hosts, devices))
        return worlds[-1]

    yield start_world
    for world in worlds:
        world.close()


@pytest.fixture(scope="module")
def pair():
    """Two hosts with two devices each."""
    world = World(hosts=2, devices=2)
    yield world
    world.close()


@pytest.fixture
def checkpoints(tmp_path):
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    yield checkpoints
    checkpoints.close()


def tree(seed: int) -> dict[str, np.ndarray]:
    """Return a tree of several dtypes with random bits."""
    rng = np.random.default_rng(seed)
    return {
        "embed": rng.standard_normal((16, 8), np.float32),
        "query": rng.standard_normal((2, 8, 8)).astype(jnp.bfloat16),
        "count": np.int32(seed),
    }


def assert_holds(world: World, name: str, expected: dict) -> None:
    """Assert that every shard of every host equals its part of the tree."""
    for shards in world.call("shards", name):
        assert shards.keys() == expected.keys()
        for key, parts in shards.items():
            assert parts
            for index, data in parts:
                assert (data.dtype, data.tobytes()) == (expected[key].dtype, expected[key][index].tobytes())


def assert_same_bits(restored: dict, expected: dict) -> None:
    assert restored.keys() == expected.keys()
    for key, array in restored.items():
        assert (array.dtype, np.asarray(array).tobytes()) == (expected[key].dtype, expected[key].tobytes())


def like(tree: dict, devices: int = 1, **splits: tuple[str | None, ...]) -> dict:
    """Return the targets of a restore, on this process's first devices as the mesh axis `x`."""
    mesh = Mesh(np.array(jax.devices()[:devices]), ("x",))
    layout = {key: NamedSharding(mesh, PartitionSpec(*splits.get(key, ()))) for key in tree}
    return {key: jax.ShapeDtypeStruct(tree[key].shape, tree[key].dtype, sharding=layout[key]) for key in tree}


def test_two_hosts_and_one_host_read_each_others_checkpoints(pair, checkpoints):
    item = pair.hold("actor", tree(1), ROWS_AND_COLUMNS)
    overwritten = threading.Event()
    checkpoints.save(1, {"actor": Disturbed(item, "finish", partial(overwritten.wait, ANSWERS_S))}, STATE)
    pair.call("overwrite", "actor")
    overwritten.set()
    checkpoints.wait()
    # Both hosts have written.
    assert len(list((checkpoints.directory / "step_1" / "actor").glob("ocdbt.process_*"))) == 2

    restored = checkpoints.read(1, {"actor": like(tree(0), 4, embed=(None, "x"))})["actor"]
    assert restored["embed"].addressable_shards[0].data.shape == (16, 2)
    assert_same_bits(restored, tree(1))

    mine = {"actor": jax.tree.map(jnp.asarray, tree(2))}
    checkpoints.save(2, {"actor": TreeItem(lambda: mine["actor"], lambda tree: None)}, STATE)
    checkpoints.wait()
    assert checkpoints.restore(2, {"actor": item}) == STATE
    assert_holds(pair, "actor", tree(2))


def test_two_hosts_convert_load_and_export_a_model(pair, tmp_path):
    source = tiny_checkpoints.write(tmp_path / "source", tiny_checkpoints.build("qwen2").to(torch.bfloat16))
    pair.call("convert", source, tmp_path / "converted", tmp_path / "exported")
    assert len(list((tmp_path / "converted" / "weights").glob("ocdbt.process_*"))) == 2
    export_converted(tmp_path / "converted", tmp_path / "by_one")
    for place in ("exported", "by_one"):
        assert {file.name for file in (tmp_path / place).iterdir()} == {file.name for file in source.iterdir()}
        for file in source.glob("*.safetensors"):
            assert (tmp_path / place / file.name).read_bytes() == file.read_bytes()


def test_hosts_refuse_other_arrays_before_any_change(pair, checkpoints):
    item = pair.hold("actor", tree(1), ROWS_AND_COLUMNS)
    checkpoints.save(1, {"actor": item}, STATE)
    wider = {**tree(2), "embed": np.zeros((16, 16), np.float32)}
    other = pair.hold("other", wider, ROWS_AND_COLUMNS)
    message = r"actor\['embed'\] is float32\[16, 8\], but this run expects float32\[16, 16\]"
    with pytest.raises(ValueError, match=message):
        checkpoints.restore(1, {"actor": other})
    assert_holds(pair, "other", wider)


def test_two_pools_and_this_process_write_one_step(pair, start, checkpoints):
    single = start(hosts=1, devices=2)
    mine = {"reference": placed(tree(3), ((4, 2), {"embed": ("x", "y")}))}
    items = {
        "actor": pair.hold("actor", tree(1), COLUMNS),
        "critic": single.hold("critic", tree(2), ROWS_TWICE),
        "reference": TreeItem(lambda: mine["reference"], lambda tree: mine.__setitem__("reference", tree)),
    }
    checkpoints.save(1, items, STATE)
    checkpoints.wait()

    # Each world takes over what another one wrote.
    assert checkpoints.restore(1, {"critic": pair.hold("critic", tree(0), COLUMNS)}) == STATE
    assert_holds(pair, "critic", tree(2))
    checkpoints.restore(1, {"reference": single.hold("reference", tree(0), ROWS_TWICE)})
    assert_holds(single, "reference", tree(3))
    others = {"actor": placed(tree(0), ((2, 4), {"embed": ("y", "x")}))}
    checkpoints.restore(1, {"actor": TreeItem(lambda: others["actor"], lambda tree: others.update(actor=tree))})
    assert_same_bits(others["actor"], tree(1))

    # And so does whoever has orbax.
    wanted = {name: ocp.args.StandardRestore(like(tree(0))) for name in items}
    options = ocp.CheckpointManagerOptions(step_prefix="step", read_only=True)
    with ocp.CheckpointManager(checkpoints.directory, options=options) as theirs:
        restored = theirs.restore(1, args=ocp.args.Composite(**wanted))
    for seed, name in enumerate(items, start=1):
        assert_same_bits(restored[name], tree(seed))


def test_full_disk_of_one_host(pair, checkpoints):
    checkpoints.save(1, {"actor": pair.hold("actor", tree(1), ROWS_AND_COLUMNS)}, STATE)
    checkpoints.wait()
    big = {**tree(2), "embed": np.random.default_rng(2).standard_normal((1024, 512), np.float32)}
    item = pair.hold("actor", big, ROWS_AND_COLUMNS)
    pair.call("limit_files", 1, 100_000)
    checkpoints.save(2, {"actor": item}, STATE)
    with pytest.raises(ValueError, match="File too large"):
        checkpoints.wait()
    assert checkpoints.steps() == [1]

    pair.call("limit_files", 1, -1)
    checkpoints.save(2, {"actor": item}, STATE)
    checkpoints.wait()
    assert checkpoints.steps() == [1, 2]
    pair.hold("actor", jax.tree.map(np.zeros_like, big), COLUMNS)
    checkpoints.restore(2, {"actor": item})
    assert_holds(pair, "actor", big)


def test_host_killed_during_saves(start, tmp_path):
    world = start(hosts=2, devices=2)
    layouts = [ROWS_AND_COLUMNS, COLUMNS]
    # Large enough for files to be under way when `save` returns.
    trees = [{**tree(step), "big": np.full((2048, 2048), step, np.float32)} for step in range(4)]
    checkpoints = Checkpoints(tmp_path, keep_last=1)
    checkpoints.save(1, {"actor": world.hold("actor", trees[1], layouts[1])}, STATE)
    checkpoints.wait()
    for method, host in [("save", 1), ("finish", 1), ("merge", 0)]:
        held = world.hold("actor", trees[2], layouts[0])
        struck = Disturbed(held, method, partial(world.kill, host))
        started = time.monotonic()
        with pytest.raises(RuntimeError, match=f"host {host} died"):
            checkpoints.save(2, {"actor": struck}, STATE)
            checkpoints.wait()
        assert time.monotonic() - started < 30
        assert checkpoints.steps() == [1]
        assert (tmp_path / "step_2.orbax-checkpoint-tmp").exists()
        checkpoints.close()
        world.close()

        world, checkpoints = start(hosts=2, devices=2), Checkpoints(tmp_path, keep_last=1)
        assert (checkpoints.latest(), checkpoints.steps()) == (1, [1])
        checkpoints.restore(1, {"actor": world.hold("actor", trees[0], layouts[0])})
        assert_holds(world, "actor", trees[1])
    checkpoints.save(2, {"actor": world.hold("actor", trees[2], layouts[0])}, STATE)
    checkpoints.close()
    assert [path.name for path in tmp_path.iterdir()] == ["step_2"]
    assert_same_bits(Checkpoints(tmp_path, read_only=True).read(2, {"actor": like(trees[2])})["actor"], trees[2])
