"""Runs at a staleness: the ages that were asked for, and the same numbers after kills."""

import functools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import jax
import killed_asynchronous
import numpy as np
import orbax.checkpoint as ocp
import pytest
from etils import epath
from tiny_runs import numbers, records

pytestmark = pytest.mark.usefixtures("programs")

AGES = {"1 on two pools": [0, 1, 1, 1, 1, 1], "4 on one pool": [0, 1, 2, 3, 4, 4]}
PUT_OFF = {"1 put off": (0, 1), "2 put off, two pools": (1, 2)}
"""Least and most age of tokens, once the run is under way."""

SLOW = ("2 put off, two pools", "4 on one pool")


def cases(names):
    """Each of the slow tier, which has whole batches and others, one pool and two, or before a release."""
    return [pytest.param(name, marks=pytest.mark.slow if name in SLOW else pytest.mark.seeds) for name in names]


@pytest.fixture(scope="module")
def folder(programs, tmp_path_factory):
    """The folder of a case, which one process and its forks have run."""
    every = tmp_path_factory.mktemp("asynchronous")

    @functools.cache
    def of(name) -> Path:
        command = [sys.executable, str(Path(killed_asynchronous.__file__)), str(every), name]
        devices = {"JAX_NUM_CPU_DEVICES": "2"}
        done = subprocess.run(command, env=os.environ | devices, capture_output=True, text=True, timeout=1200)
        assert done.returncode == 0, done.stderr
        return every / name

    return of


@pytest.mark.parametrize("name", cases([*AGES, *PUT_OFF]))
def test_a_run_that_was_killed_again_and_again_is_equal_to_the_last_bit(name, folder):
    case = killed_asynchronous.cases()[name]
    saved = case.config.checkpoint.every_steps
    killed = [[-signal.SIGKILL, (death.step - 1) // saved * saved] for death in case.deaths]
    assert json.loads((folder(name) / "ends.json").read_text()) == [[0, 6], *killed, [0, 6]]
    assert_equal(folder(name) / "cut", folder(name) / "whole")


def assert_equal(workdir: Path, other: Path) -> None:
    """Assert that metrics, samples, evaluations and the arrays of the last checkpoint are equal bit by bit."""
    assert numbers(workdir / "metrics.jsonl") == numbers(other / "metrics.jsonl")
    for file in ("samples.jsonl", "evaluation.jsonl"):
        assert (workdir / file).read_bytes() == (other / file).read_bytes()
    mine, theirs = last_arrays(workdir), last_arrays(other)
    assert mine.keys() == theirs.keys() and any(name.startswith("actor/") for name in mine)
    for name in mine:
        assert mine[name].dtype == theirs[name].dtype, name
        assert mine[name].tobytes() == theirs[name].tobytes(), name


def last_arrays(workdir: Path) -> dict[str, np.ndarray]:
    """Arrays of the last checkpoint, by role and path."""
    [folder] = workdir.glob("checkpoints/step_6")
    handler, arrays = ocp.PyTreeCheckpointHandler(), {}
    for item in sorted(folder.glob("*/_METADATA")):
        saved = handler.metadata(epath.Path(item.parent)).tree
        how = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), saved)
        tree = handler.restore(epath.Path(item.parent), args=ocp.args.PyTreeRestore(restore_args=how))
        for path, value in jax.tree.leaves_with_path(tree):
            arrays[f"{item.parent.name}/{jax.tree_util.keystr(path)}"] = np.asarray(value)
    return arrays


@pytest.mark.parametrize("name", cases(AGES))
def test_responses_of_whole_batches_are_as_old_as_the_staleness(name, folder):
    logged = numbers(folder(name) / "whole" / "metrics.jsonl")
    assert [record["staleness/age_mean"] for record in logged] == AGES[name]
    assert [record["staleness/age_max"] for record in logged] == AGES[name]
    assert [record[f"staleness/share_age_{age}"] for record, age in zip(logged, AGES[name], strict=True)] == [1.0] * 6
    # Responses of the policy that learns are as likely to it as to the sampler; those of older ones are not.
    assert logged[0]["sampler/kl"] < 1e-9 and all(record["sampler/kl"] > 1e-6 for record in logged[1:])
    assert all(record["correction/weight_mean"] != 1 for record in logged[1:])
    steps = records(folder(name) / "whole" / "metrics.jsonl")
    fetched = [record["time/fetch_s"] > 0 for record in steps]
    assert fetched[:5] == ["two pools" in name] * 5, "whenever a pool of its own is to draw for a later step"


@pytest.mark.parametrize("name", cases(PUT_OFF))
def test_groups_that_are_put_off_have_tokens_of_several_policies_and_none_too_old(name, folder):
    logged = numbers(folder(name) / "whole" / "metrics.jsonl")
    least, most = PUT_OFF[name]
    assert all(record["staleness/put_off_groups"] == 4 for record in logged)
    for number, record in enumerate(logged):
        shares = {int(key.rsplit("_", 1)[1]): value for key, value in record.items() if "share_age" in key}
        assert min(shares) == min(number, least) and max(shares) == record["staleness/age_max"] <= most
        assert sum(shares.values()) == pytest.approx(1)
        assert len(shares) > 1 or number < 1 + least
    assert any(record["staleness/recomputed_tokens"] > 0 for record in logged)
    assert all(record["sampler/kl"] > 1e-6 for record in logged[1 + least :])


@pytest.mark.slow
def test_on_two_pools_responses_are_generated_while_the_policy_is_updated(folder):
    whole = folder("2 put off, two pools") / "whole"
    events = json.loads((whole / "timeline.json").read_text())
    spans = {
        verb: [(event["ts"], event["ts"] + event["dur"]) for event in events if event["name"] == verb]
        for verb in ("continue_groups", "compute_log_prob", "update_actor")
    }
    learning = spans["compute_log_prob"] + spans["update_actor"]
    assert any(a < end and start < b for a, b in learning for start, end in spans["continue_groups"])
    shares = [record["time/generation_idle_share"] for record in records(whole / "metrics.jsonl")]
    assert all(0 <= share <= 1 for share in shares)
