"""Whatever an algorithm carries from step to step: resumed by another process, its run gives the same numbers.

The slow tier has dynamic sampling. Of those before a release Safe RLHF carries most: a KL coefficient that adapts, a
multiplier, two critics and the place in its examples. `test_resume.py` kills runs at every moment.
"""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import resumed_runs
from placed_runs import assert_resumed
from tiny_runs import numbers

pytestmark = pytest.mark.usefixtures("programs")


def prime_moves(logged: list[dict]) -> bool:
    losses = [record["process_reward/loss"] for record in logged]
    assert logged[0]["process/log_ratio"] < 1e-5, "it starts as the reference"
    assert all(record["process/log_ratio"] > 1e-3 for record in logged[1:])
    assert losses[0] == pytest.approx(math.log(2), abs=0.05)
    assert len({record["kl/coefficient"] for record in logged}) > 3
    assert all(record["process_reward/grad_norm"] > 0 for record in logged)
    assert all(abs(record["policy/kl_old_first"]) < 1e-5 for record in logged)
    return len(set(losses)) == len(losses)


def safe_rlhf_moves(logged: list[dict]) -> bool:
    for name in ("critic/loss", "cost_critic/loss", "value/loss", "cost_value/loss", "actor/loss", "ptx/loss"):
        values = [record[name] for record in logged]
        assert all(map(math.isfinite, values)) and len(set(values)) == len(values), name
    assert logged[-1]["ptx/loss"] < logged[0]["ptx/loss"]
    assert len({record["kl/coefficient"] for record in logged}) > 3
    assert all(abs(record["policy/kl_old_first"]) < 1e-5 for record in logged)
    return len({record["cost/multiplier"] for record in logged}) == len(logged)


MOVES = {
    "VAPO": lambda logged: (
        ["vapo/imitation_loss" in record for record in logged] == [False] * 3 + [True] * 3
        and all(0 < record["vapo/lambda_mean"] < 1 for record in logged)
    ),
    "rows over two devices": lambda logged: len({record["actor/grad_norm"] for record in logged}) == len(logged),
    "DAPO": lambda logged: max(record["group/generated"] for record in logged[:2]) > 8,
    "drafts": lambda logged: all(
        record["speculation/tokens_per_pass"] > 1 and record["sampler/logp_gap_mean"] < 1e-5 for record in logged
    ),  # and the resumed run has no earlier responses to draft from
    "RewardModel": lambda logged: len({record["preference/margin"] for record in logged}) > 3,
    "PRIME": prime_moves,  # its process reward model
    "SafeRLHF": safe_rlhf_moves,  # its multiplier, both critics and its examples
}
"""Traces of a case in its numbers, so that a run which had lost it would have others."""


SLOW = "DAPO", "drafts"
TIMED = {"drafts": ("sampler/", "speculation/")}
"""Prefixes of metrics by case, where timings decide which program samples a token: never which token, only the last
digits of its probability."""
CASES = [pytest.param(name, marks=pytest.mark.slow if name in SLOW else pytest.mark.seeds) for name in MOVES]


@pytest.mark.parametrize("name", CASES)
def test_a_run_that_is_resumed_gives_the_same_numbers(name, tmp_path):
    command = [sys.executable, str(Path(resumed_runs.__file__)), str(tmp_path), name]
    devices = {"JAX_NUM_CPU_DEVICES": "2"}
    done = subprocess.run(command, env=os.environ | devices, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("resuming after step") == 1, done.stdout
    folder = tmp_path / name
    whole, cut = folder / "whole", folder / "cut"
    assert json.loads((folder / "ends.json").read_text()) == [0, 0]
    logged = numbers(whole / "metrics.jsonl")
    assert MOVES[name](logged)
    assert_resumed(cut, whole, after=resumed_runs.SAVED_EVERY, without=TIMED.get(name, ()))
    assert [record["step"] for record in logged] == [1, 2, 3, 4, 5, 6]
    for file in ("samples.jsonl", "evaluation.jsonl"):
        assert (cut / file).read_bytes() == (whole / file).read_bytes()
