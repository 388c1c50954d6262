"""The same run on one device and on pools of eight: whatever is placed where, the numbers stay."""

import pytest
from placed_runs import APART, SPLIT, assert_same_numbers, run
from tiny_runs import records

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("programs", "undrawn")]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return run(tmp_path_factory.mktemp("alone"))


def metrics(workdir, room):
    """The last step's metrics of one room, such as `offload`."""
    return {name: value for name, value in records(workdir / "metrics.jsonl")[-1].items() if name.startswith(room)}


def test_two_pools_and_a_generation_layout_that_training_does_not_refine(alone, tmp_path):
    run(tmp_path, pools=SPLIT, actor={"fsdp": 2, "tensor": 2, "generation_tensor": 4}, critic={"fsdp": 4})
    assert_same_numbers(tmp_path, alone)
    assert metrics(tmp_path, "relayout/")["relayout/received_bytes"] > 0
    saved = {path.name for path in (tmp_path / "checkpoints" / "step_2").iterdir()}
    assert saved >= {"actor", "actor_optimizer", "critic", "critic_optimizer"}


def test_generation_on_a_pool_apart(alone, tmp_path):
    run(tmp_path, pools=APART, actor={"fsdp": 2, "tensor": 2, "generation_tensor": 2}, critic={"fsdp": 4})
    assert_same_numbers(tmp_path, alone)
    assert metrics(tmp_path, "transfer/")["transfer/received_bytes"] > 0
    assert metrics(tmp_path, "relayout/") == {"relayout/received_bytes": 0.0}


def test_stages_in_both_layouts_and_models_that_wait_in_host_memory(alone, tmp_path):
    layout = {"stage": 2, "tensor": 2, "fsdp": 2, "generation_stage": 2, "generation_tensor": 1}
    offload = ("actor", "critic", "reference")
    run(tmp_path, devices=8, actor=layout, critic={"stage": 2, "fsdp": 4}, offload=offload)
    assert_same_numbers(tmp_path, alone)
    moved = metrics(tmp_path, "offload/")
    assert all(moved[f"offload/{role}_bytes"] > 0 for role in offload)
