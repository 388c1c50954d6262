"""Damage of what is not an array: the JSON state, the metric that ranks, and orbax's own files."""

import json
import shutil
import zlib
from contextlib import closing

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrlhf.checkpoint import Checkpoints, Damaged, TreeItem

STATE = {"step": 1, "state": {"kl_coefficient": 0.1}}


def held():
    return {name: TreeItem(lambda: {"x": jnp.ones(2)}, lambda _: None) for name in ("actor", "critic")}


@pytest.fixture
def folder(tmp_path):
    """Checkpoints of steps 1 to 3; step 2 is the best."""
    with closing(Checkpoints(tmp_path / "checkpoints", keep_last=3)) as checkpoints:
        for step, metric in enumerate((0.25, 0.5, None), start=1):
            checkpoints.save(step, held(), STATE, metric=metric)
    return tmp_path / "checkpoints"


def state_of(folder, step):
    return folder / f"step_{step}" / "host" / "metadata"


def restored(folder, step, **how):
    with closing(Checkpoints(folder, **how)) as checkpoints:
        return checkpoints.restore(step, held())


def written_by_an_earlier_version(folder, step, metric, *, checksums):
    """Change a checkpoint into one with the metric in a file, and with or without checksums."""
    checkpoint = folder / f"step_{step}"
    contents = {"state": STATE, "arrays": json.loads(state_of(folder, step).read_text())["arrays"]}
    if checksums:
        contents["checksum"] = zlib.crc32(json.dumps(contents, sort_keys=True).encode())
    else:
        for name in ("actor", "critic"):
            (checkpoint / name / "checksums.json").unlink()
    state_of(folder, step).write_text(json.dumps(contents))
    (checkpoint / "metrics").mkdir()
    (checkpoint / "metrics" / "metrics").write_text(metric)


def test_no_flipped_bit_makes_a_state_unchecked(folder):
    content = state_of(folder, 3).read_bytes()
    place = content.index(b'"checksum"')
    with closing(Checkpoints(folder, read_only=True)) as checkpoints:
        for bit in range(8 * place, 8 * (place + len(b'"checksum"'))):
            damaged = bytearray(content)
            damaged[bit // 8] ^= 1 << bit % 8
            state_of(folder, 3).write_bytes(damaged)
            with pytest.raises(Damaged, match=r"step 3 is damaged: .*/step_3/host"):
                checkpoints.restore(3, held())
        state_of(folder, 3).write_bytes(content)
        assert checkpoints.restore(3, held()) == STATE


def test_state_without_a_checksum_needs_items_without_checksums(folder):
    written_by_an_earlier_version(folder, 3, "{}", checksums=False)
    assert restored(folder, 3) == STATE
    shutil.copy(folder / "step_2" / "critic" / "checksums.json", folder / "step_3" / "critic")
    with pytest.raises(Damaged, match=r"step 3 is damaged: .*/step_3/host/metadata has a wrong checksum"):
        restored(folder, 3)


@pytest.mark.parametrize("contents", ["[]", "5", '{"state": {}, "arrays": []}', '{"state": {}, "arrays": {"a": 5}}'])
def test_state_of_another_form_is_damage(folder, contents):
    state_of(folder, 3).write_text(contents)
    for item in ("actor", "critic"):
        (folder / "step_3" / item / "checksums.json").unlink()
    with pytest.raises(Damaged, match=r"step 3 is damaged: .*/step_3/host"):
        restored(folder, 3, read_only=True)


@pytest.mark.parametrize("item", ["actor", "critic"])
def test_item_of_another_checkpoint_is_damage(folder, tmp_path, item):
    """A copy that was interrupted mixes checkpoints; each item is whole by itself."""
    with closing(Checkpoints(tmp_path / "other" / "checkpoints")) as checkpoints:
        checkpoints.save(3, held(), STATE)
    shutil.rmtree(folder / "step_3" / item)
    shutil.copytree(tmp_path / "other" / "checkpoints" / "step_3" / item, folder / "step_3" / item)
    with pytest.raises(Damaged, match=rf"step 3 is damaged: .*/step_3/{item} belongs to another checkpoint"):
        restored(folder, 3)


def saved_once_more(folder, **how):
    """Save step 4 where one checkpoint is kept beside the best one; return the steps that are left."""
    with closing(Checkpoints(folder, keep_last=1, keep_best=1, **how)) as checkpoints:
        checkpoints.save(4, held(), STATE)
        checkpoints.wait()
        return checkpoints.steps()


def test_flipped_metric_deletes_no_checkpoint(folder):
    content = state_of(folder, 1).read_text()
    state_of(folder, 1).write_text(content.replace('"metric": 0.25', '"metric": 4.25'))
    with pytest.raises(Damaged, match=r"step 1 is damaged: .*; other checkpoints: steps 2, 3\. To resume"):
        saved_once_more(folder)
    assert restored(folder, 3, read_only=True) == STATE  # a reader ranks nothing
    state_of(folder, 1).write_text(content)
    assert saved_once_more(folder) == [2, 4]


def test_checkpoint_of_a_flipped_metric_is_passed_over(folder, capsys):
    content = state_of(folder, 1).read_text()
    state_of(folder, 1).write_text(content.replace('"metric": 0.25', '"metric": 4.25'))
    assert saved_once_more(folder, on_damage="previous") == [2, 4]
    said = capsys.readouterr().out
    assert f"moved the checkpoint to {folder}_damaged/step_1" in said
    assert "on_damage" not in said  # it is set already
    assert (folder.with_name("checkpoints_damaged") / "step_1" / "actor").is_dir()


def test_only_checkpoint_is_not_passed_over(folder):
    for step in (1, 2):
        shutil.rmtree(folder / f"step_{step}")
    state_of(folder, 3).write_text("{}")
    with pytest.raises(Damaged, match=r"no other checkpoints\. Restore the checkpoint from a copy, or choose another"):
        restored(folder, 3, on_damage="previous")
    assert (folder / "step_3").is_dir()


@pytest.mark.parametrize("checksums", [True, False])
def test_metrics_of_an_earlier_version_rank(folder, checksums):
    for step, metric in ((1, '{"score": 0.75}'), (2, '{"score": 0.5}'), (3, "{}")):
        written_by_an_earlier_version(folder, step, metric, checksums=checksums)
    assert saved_once_more(folder) == [1, 4]


@pytest.mark.parametrize("metrics", ["", "5", "[]", '{"score": ', '{"scorf": 0.5}', '{"score": []}', "[" * 100_000])
def test_damaged_metrics_of_an_earlier_version_are_named(folder, metrics):
    written_by_an_earlier_version(folder, 1, metrics, checksums=True)
    with pytest.raises(Damaged, match=r"/step_1/metrics/metrics is damaged \(.*\); move .*/step_1 to another folder"):
        saved_once_more(folder)
    assert saved_once_more(folder, on_damage="previous") == [2, 4]


@pytest.mark.parametrize("content", ["", "5", "[]", '{"metrics": 5}', '{"item_handlers": {"actor": 5}}'])
def test_nothing_depends_on_files_of_orbax_without_a_checksum(folder, content):
    for step in (1, 2, 3):
        (folder / f"step_{step}" / "_CHECKPOINT_METADATA").write_text(content)
    assert restored(folder, 3) == STATE
    state_of(folder, 3).write_text("{}")
    with closing(Checkpoints(folder, on_damage="previous")) as checkpoints:  # moves a checkpoint, and looks again
        assert checkpoints.latest() == 2
        tree = checkpoints.read(2, {"actor": {"x": jnp.ones(2)}})["actor"]
    np.testing.assert_array_equal(tree["x"], np.ones(2))
