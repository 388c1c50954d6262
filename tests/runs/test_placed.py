"""One run on one device, on eight in other layouts and on pools of them: the same tokens and the same numbers."""

import pytest
from placed_runs import assert_same_numbers, cut_after, pools_of, run
from tiny_runs import numbers, records

pytestmark = pytest.mark.usefixtures("programs", "undrawn")

STEPS = 3  # as in distributed/test_runs.py, whose programs are the same


@pytest.fixture(scope="module")
def alone(programs, undrawn, tmp_path_factory):
    return run(tmp_path_factory.mktemp("alone"), steps=STEPS)


def metrics(workdir, room):
    """The last step's metrics of one room, such as `offload`."""
    return {name: value for name, value in records(workdir / "metrics.jsonl")[-1].items() if name.startswith(room)}


@pytest.mark.seeds  # the next test has them from the second step on
def test_eight_devices(alone, tmp_path):
    run(tmp_path, devices=8, actor={"fsdp": 4, "tensor": 2, "generation_tensor": 1}, critic={"fsdp": 8}, steps=STEPS)
    assert_same_numbers(tmp_path, alone)


@pytest.mark.slow
def test_eight_devices_go_on_from_the_checkpoint_of_one_in_stages(alone, tmp_path):
    """Their generation has a layout that training does not refine."""
    workdir = cut_after(1, alone, tmp_path / "moved")
    layout = {"stage": 2, "fsdp": 2, "tensor": 2, "generation_stage": 2, "generation_tensor": 4}
    run(workdir, devices=8, actor=layout, critic={"data": 2, "tensor": 4}, steps=STEPS)
    assert_same_numbers(workdir, alone)
    mine, theirs = numbers(workdir / "metrics.jsonl"), numbers(alone / "metrics.jsonl")
    assert mine[0] == theirs[0]
    assert mine[1:] != theirs[1:], "later steps were not computed anew"
    assert metrics(workdir, "relayout/")["relayout/received_bytes"] > 0


@pytest.mark.seeds  # distributed/test_runs.py has it with a host for each pool
def test_a_pool_each_for_policy_value_and_generation(alone, tmp_path):
    actor = {"fsdp": 2, "tensor": 2, "generation_tensor": 2}
    run(tmp_path, pools=pools_of(4, 2, 2), actor=actor, critic={"fsdp": 2}, steps=STEPS)
    assert_same_numbers(tmp_path, alone)
    assert metrics(tmp_path, "transfer/")["transfer/received_bytes"] > 0
    assert metrics(tmp_path, "relayout/") == {"relayout/received_bytes": 0.0}
    saved = {path.name for path in (tmp_path / "checkpoints" / f"step_{STEPS}").iterdir()}
    assert saved >= {"actor", "actor_optimizer", "critic", "critic_optimizer"}


@pytest.mark.slow
def test_devices_that_share_the_positions_of_caches_and_models_that_wait_in_host_memory(alone, tmp_path):
    actor = {"fsdp": 2, "context": 2, "tensor": 2, "generation_context": 2, "generation_tensor": 2}
    offload = ("actor", "critic", "reference")
    run(tmp_path, devices=8, actor=actor, critic={"stage": 2, "fsdp": 4}, offload=offload, steps=STEPS)
    assert_same_numbers(tmp_path, alone)
    moved = metrics(tmp_path, "offload/")
    assert all(moved[f"offload/{role}_bytes"] > 0 for role in offload)
