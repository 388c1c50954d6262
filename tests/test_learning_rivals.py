"""Safe RLHF keeps to its limit where PPO does not, and PRIME fails less often than what sees outcomes alone."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tiny_runs import records

PROGRAM = Path(__file__).with_name("rival_runs.py")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def learnt(tmp_path_factory):
    """The metrics of a rival's run from a seed; the first run of each rival compiles."""
    folder = tmp_path_factory.mktemp("rivals")
    ours = {name: value for name, value in os.environ.items() if name not in ("NPROC", "JAX_PLATFORMS")}
    cache = {"JAX_ENABLE_COMPILATION_CACHE": "true", "JAX_COMPILATION_CACHE_DIR": str(folder / "compiled")}

    def run(name: str, seed: int) -> list[dict]:
        workdir = folder / f"{name}_{seed}"
        command = [sys.executable, str(PROGRAM), name, str(seed), str(workdir)]
        done = subprocess.run(command, env={**ours, **cache}, capture_output=True, text=True, timeout=900)
        assert done.returncode == 0, done.stderr
        logged = records(workdir / "metrics.jsonl")
        assert len({record["compile/count"] for record in logged}) == 1
        return logged

    return run


def last(logged: list[dict], name: str, *, steps: int = 8) -> float:
    """Mean over the last steps."""
    return float(np.mean([record[name] for record in logged[-steps:]]))


@pytest.mark.parametrize("seed", range(3))
def test_safe_rlhf_meets_its_limit_and_keeps_the_reward(learnt, seed):
    safe, greedy = learnt("SafeRLHF", seed), learnt("PPO", seed)
    assert last(greedy, "score/format_3") >= 0.8, "PPO is to be tempted by what costs"
    assert last(safe, "cost/mean") <= 0.1
    for logged in (safe, greedy):
        assert logged[0]["score/format"] <= 0.4
        assert last(logged, "score/format") >= 0.9
    assert last(safe, "cost/unsafe_fraction") == pytest.approx(last(safe, "cost/mean"))


def test_prime_fails_half_as_often_as_rloo_after_as_many_steps(learnt):
    failed = {}
    for name in ("PRIME", "RLOO"):
        of_seeds = [learnt(name, seed) for seed in range(3)]
        assert all(last(logged[:8], "score/mean") <= 0.5 for logged in of_seeds)
        failed[name] = [1 - last(logged, "score/mean", steps=20) for logged in of_seeds]
    # One seed can be lucky or not: its first right responses come sooner or later.
    assert np.mean(failed["PRIME"]) <= 0.5 * np.mean(failed["RLOO"])
