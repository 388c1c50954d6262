"""Checkpoints: preservation, restores, and refusals."""

import json
import re
import threading

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrlhf.checkpoint import Checkpoints, Damaged, TreeItem

STATE = {"step": 3, "state": {"kl_coefficient": 0.1 + 0.2}, "loader": {"epoch": 1, "offset": 8}}


@pytest.fixture
def opened(tmp_path):
    """Function that opens `Checkpoints` of one directory; all are closed at the end."""
    opened = []

    def open_again(**settings) -> Checkpoints:
        opened.append(Checkpoints(tmp_path / "checkpoints", **settings))
        return opened[-1]

    yield open_again
    for checkpoints in opened:
        checkpoints.close()


def tree(seed=0):
    """Parameters of several dtypes and shapes, with random bits."""
    rng = np.random.default_rng(seed)
    return {
        "embed": jnp.asarray(rng.standard_normal((16, 8)), jnp.float32),
        "layers": {"query": jnp.asarray(rng.standard_normal((2, 8, 8)), jnp.bfloat16)},
        "count": jnp.asarray(7, jnp.int32),
    }


def held_in(trees):
    """Return an item for each tree; a restore replaces the tree."""

    def item(name):
        return TreeItem(lambda: trees[name], lambda tree: trees.__setitem__(name, tree))

    return {name: item(name) for name in trees}


def held(**trees):
    return held_in(trees)


def like(tree, sharding=None):
    """Return the targets of a restore."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding or x.sharding), tree)


def assert_same_bits(tree, expected):
    def check(array, other):
        assert (array.dtype, array.shape) == (other.dtype, other.shape)
        np.testing.assert_array_equal(np.asarray(array).view(np.uint8), np.asarray(other).view(np.uint8))

    jax.tree.map(lambda a, b: check(jnp.atleast_1d(a), jnp.atleast_1d(b)), tree, expected)


def test_arrays_and_state_round_trip(opened):
    trees = {"actor": tree(0), "actor_optimizer": [tree(1), ()]}
    writer = opened()
    assert (writer.latest(), writer.steps()) == (None, [])
    writer.save(3, held(**trees), STATE, metric=0.5)
    writer.wait()
    assert (writer.latest(), writer.steps()) == (3, [3])

    others = {"actor": tree(2), "actor_optimizer": [tree(3), ()]}
    old = jax.tree.leaves(others)
    state = opened().restore(3, held_in(others))
    assert_same_bits(others, trees)
    assert state == STATE
    assert all(array.is_deleted() for array in old)  # there was memory for one tree


def test_checkpoint_is_readable_by_orbax(opened, tmp_path):
    writer = opened()
    writer.save(3, held(actor=tree()), STATE)
    writer.close()
    with ocp.CheckpointManager(
        tmp_path / "checkpoints", options=ocp.CheckpointManagerOptions(step_prefix="step", read_only=True)
    ) as theirs:
        restored = theirs.restore(3)
    assert_same_bits(restored["actor"], tree())
    assert restored["host"]["state"] == STATE


def test_read_only_access_writes_nothing(opened, tmp_path, caplog):
    writer = opened()
    writer.save(3, held(actor=tree()), STATE)
    writer.close()
    (tmp_path / "checkpoints" / "step_4.orbax-checkpoint-tmp").mkdir()  # may be a save under way
    there = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    caplog.clear()
    reader = Checkpoints(tmp_path / "checkpoints", read_only=True)
    assert reader.steps() == [3]
    assert_same_bits(reader.read(3, {"actor": like(tree())})["actor"], tree())
    reader.close()
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == there
    assert [record.getMessage() for record in caplog.records if record.levelname != "INFO"] == []


def test_one_item_can_be_restored_alone(opened):
    checkpoints = opened()
    checkpoints.save(1, held(actor=tree(0), critic=tree(1)), STATE)
    checkpoints.wait()
    restored = checkpoints.read(1, {"critic": like(tree(1))})
    assert restored.keys() == {"critic"}
    assert_same_bits(restored["critic"], tree(1))


def test_arrays_may_be_overwritten_once_save_returns(opened):
    big = {"weight": jnp.arange(8_000_000, dtype=jnp.float32), "bias": jnp.arange(1000.0)}
    expected = jax.tree.map(np.array, big)
    overwrite = jax.jit(lambda tree: jax.tree.map(lambda x: x * 0 - 1, tree), donate_argnums=0)
    checkpoints = opened()
    checkpoints.save(1, held(actor=big), STATE)
    big = jax.block_until_ready(overwrite(big))
    checkpoints.wait()
    restored = checkpoints.read(1, {"actor": like(big)})
    assert_same_bits(restored["actor"], expected)


def test_restore_into_another_layout(opened):
    devices = np.array(jax.devices()).reshape(4, 2)
    mesh = Mesh(devices, ("fsdp", "tensor"))
    stored = tree(0)
    checkpoints = opened()
    checkpoints.save(1, held(actor=stored), STATE)
    checkpoints.wait()

    split = NamedSharding(mesh, PartitionSpec("fsdp", "tensor"))
    target = {"embed": like(stored["embed"], split)} | {
        name: like(stored[name], NamedSharding(mesh, PartitionSpec())) for name in ("layers", "count")
    }
    restored = checkpoints.read(1, {"actor": target})
    assert restored["actor"]["embed"].sharding == split
    assert restored["actor"]["embed"].addressable_shards[0].data.shape == (4, 4)
    assert_same_bits(restored["actor"], stored)

    # And back from eight devices to one.
    checkpoints.save(2, held(**restored), STATE)
    checkpoints.wait()
    back = checkpoints.read(2, {"actor": like(stored)})
    assert back["actor"]["embed"].sharding == stored["embed"].sharding
    assert_same_bits(back["actor"], stored)


# Which are kept.


def saves(opened, metrics, **settings):
    """Return the steps kept after saves with these metrics, each by another `Checkpoints`."""
    for step, metric in enumerate(metrics, start=1):
        checkpoints = opened(**settings)
        checkpoints.save(step, held(actor={"x": jnp.ones(2)}), STATE, metric=metric)
        checkpoints.close()
    return opened(**settings).steps()


def test_newest_checkpoints_are_kept(opened):
    assert saves(opened, [0.9, 0.1, 0.2, 0.3], keep_last=2) == [3, 4]


def test_best_and_newest_checkpoints_are_kept(opened):
    assert saves(opened, [0.1, 0.9, 0.2, 0.8, 0.3, 0.4], keep_last=1, keep_best=2) == [2, 4, 6]


def test_checkpoint_without_a_metric_is_never_best(opened):
    assert saves(opened, [None, 0.1, None, None], keep_last=1, keep_best=1) == [2, 4]


def test_nan_is_no_metric(opened):
    assert saves(opened, [0.2, float("nan"), 0.1, 0.1], keep_last=1, keep_best=1) == [1, 4]


def test_unfinished_saves_are_removed(opened, tmp_path):
    checkpoints = opened()
    checkpoints.save(1, held(actor=tree()), STATE)
    checkpoints.close()
    torn = tmp_path / "checkpoints" / "step_2.orbax-checkpoint-tmp"
    (torn / "actor.orbax-checkpoint-tmp").mkdir(parents=True)
    checkpoints = opened()
    assert checkpoints.latest() == 1
    checkpoints.save(2, held(actor=tree()), STATE)
    checkpoints.close()
    assert checkpoints.steps() == [1, 2]
    assert not torn.exists()


# What fails.


class Disturbed:
    """Return an item of `tree()` with some methods replaced."""

    def __init__(self, **methods):
        self.item = TreeItem(tree, lambda tree: None)
        self.__dict__.update(methods)

    def __getattr__(self, name):
        return getattr(self.item, name)


def failing(method):
    def fail(*args):
        raise OSError("No space left on device")

    return Disturbed(**{method: fail})


def test_save_that_fails_immediately(opened):
    checkpoints = opened(keep_last=1)
    checkpoints.save(1, held(actor=tree(1)), STATE)
    with pytest.raises(OSError, match="No space left"):
        checkpoints.save(2, {"actor": failing("save"), **held(critic=tree(2))}, STATE)
    assert_only_step_1_and_a_next_save_works(checkpoints)


@pytest.mark.parametrize("method", ["finish", "merge"])
@pytest.mark.parametrize("then", ["wait", "save", "close"])
def test_save_that_fails_later(opened, method, then):
    checkpoints = opened(keep_last=1)
    checkpoints.save(1, held(actor=tree(1)), STATE)
    checkpoints.save(2, {"actor": failing(method), **held(critic=tree(2))}, STATE)
    with pytest.raises(OSError, match="No space left"):
        if then == "save":
            checkpoints.save(3, held(actor=tree(3)), STATE)
        else:
            getattr(checkpoints, then)()
    assert_only_step_1_and_a_next_save_works(opened(keep_last=1) if then == "close" else checkpoints)


def test_second_failure_is_noted(opened):
    checkpoints = opened()
    checkpoints.save(1, {"actor": failing("finish"), "critic": failing("finish")}, STATE)
    with pytest.raises(OSError, match="No space left") as raised:
        checkpoints.wait()
    assert raised.value.__notes__ == ["another item failed too: OSError('No space left on device')"]


def assert_only_step_1_and_a_next_save_works(checkpoints):
    assert (checkpoints.latest(), checkpoints.steps()) == (1, [1])
    assert_same_bits(checkpoints.read(1, {"actor": like(tree())}), {"actor": tree(1)})
    checkpoints.save(2, held(actor=tree(2)), STATE)
    checkpoints.wait()
    assert checkpoints.steps() == [2]
    assert_same_bits(checkpoints.read(2, {"actor": like(tree())}), {"actor": tree(2)})
    assert {path.name for path in checkpoints.directory.iterdir()} == {"step_2"}


def test_saving_is_asynchronous(opened, tmp_path):
    written = threading.Event()
    slow = Disturbed(finish=lambda: [written.wait(timeout=60), slow.item.finish()])
    checkpoints = opened()
    checkpoints.save(1, {"actor": slow}, STATE)
    assert not (tmp_path / "checkpoints" / "step_1").exists()
    written.set()
    checkpoints.wait()
    assert (tmp_path / "checkpoints" / "step_1").exists()


def test_host_without_the_directory(refused, tmp_path):
    with refused():
        TreeItem(tree, lambda tree: None).save(tmp_path / "actor")


# What is refused.


@pytest.fixture
def stored(opened):
    checkpoints = opened()
    checkpoints.save(5, held(actor=tree()), STATE)
    checkpoints.wait()
    return checkpoints


def test_missing_item(refused, stored):
    with refused():
        stored.read(5, {"actor": like(tree()), "critic": like(tree())})


@pytest.mark.parametrize(
    "changes",
    [
        {"embed": jnp.zeros((16, 4))},
        {"embed": jnp.zeros((16, 8), jnp.bfloat16)},
        {"head": jnp.zeros(8)},
    ],
)
def test_other_arrays(refused, stored, changes):
    with refused():
        stored.read(5, {"actor": like({**tree(), **changes})})


def test_refused_restore_changes_no_array(refused, stored):
    trees = {"actor": tree(1), "critic": tree(2)}
    with refused():
        stored.restore(5, held_in(trees))
    assert_same_bits(trees, {"actor": tree(1), "critic": tree(2)})


def test_stored_array_without_a_target(refused, stored):
    target = {name: array for name, array in like(tree()).items() if name != "count"}
    with refused():
        stored.read(5, {"actor": target})


def test_host_state_is_json(stored, tmp_path):
    [file] = (tmp_path / "checkpoints" / "step_5" / "host").glob("metadata")
    assert json.loads(file.read_text())["state"] == STATE


def flipped(file, bit):
    content = bytearray(file.read_bytes())
    content[bit // 8 % len(content)] ^= 1 << bit % 8
    file.write_bytes(content)


def cut(file, _):
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def zeroed(file, _):
    content = file.read_bytes()
    file.write_bytes(content[:-8] + bytes(8) if len(content) > 8 else b"")


@pytest.mark.parametrize(
    "damage", [flipped, cut, zeroed, lambda file, _: file.unlink()], ids=["bit", "cut", "zero", "gone"]
)
def test_damaged_file_is_named_and_no_array_is_changed(damage, stored, tmp_path):
    folder = tmp_path / "checkpoints" / "step_5"
    files = sorted(path for item in ("actor", "host") for path in (folder / item).rglob("*") if path.is_file())
    files = [path for path in files if path.name != "commit_success.txt"]  # empty of meaning here
    dice = np.random.default_rng(3)
    assert len(files) > 4
    for file in files:
        content = file.read_bytes()
        damage(file, int(dice.integers(8 * len(content))))
        trees = {"actor": tree(seed=1)}
        with pytest.raises(Damaged, match=r"the checkpoint of step 5 is damaged: .*; no other checkpoints\."):
            stored.restore(5, held_in(trees))
        assert_same_bits(trees["actor"], tree(seed=1))
        with pytest.raises(Damaged, match=re.escape(str(folder))):
            stored.read(5, {"actor": like(tree())})
        file.write_bytes(content)
    assert stored.restore(5, held_in(trees)) == STATE


def test_step_of_a_moved_checkpoint_can_be_saved_again(stored, opened, tmp_path):
    assert stored.set_aside(5) == tmp_path / "checkpoints_damaged" / "step_5"
    assert stored.latest() is None
    stored.save(5, held(actor=tree()), STATE)
    stored.wait()
    assert stored.set_aside(5) == tmp_path / "checkpoints_damaged" / "step_5_again"
