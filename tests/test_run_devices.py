"""The same run on one device and on eight, in other layouts: the same tokens and the same numbers."""

import shutil

import pytest
from placed_runs import assert_same_numbers, run
from tiny_runs import numbers

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("programs", "undrawn")]

STEPS = 4


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return run(tmp_path_factory.mktemp("alone"), steps=STEPS)


def test_eight_devices(alone, tmp_path):
    layout = {"fsdp": 4, "tensor": 2, "generation_tensor": 1}
    run(tmp_path, devices=8, actor=layout, critic=layout, steps=STEPS)
    assert_same_numbers(tmp_path, alone)


def test_eight_devices_go_on_from_the_checkpoint_of_one(alone, tmp_path):
    workdir = tmp_path / "moved"
    shutil.copytree(alone, workdir)
    for step in ("step_3", "step_4"):
        shutil.rmtree(workdir / "checkpoints" / step)
    layout = {"data": 2, "tensor": 4, "generation_tensor": 2}
    run(workdir, devices=8, actor=layout, critic={"data": 2, "tensor": 4}, steps=STEPS)
    assert_same_numbers(workdir, alone)
    mine, theirs = numbers(workdir / "metrics.jsonl"), numbers(alone / "metrics.jsonl")
    assert mine[:2] == theirs[:2]
    assert mine[2:] != theirs[2:], "the second half was not computed anew"
