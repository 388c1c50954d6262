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


@pytest.mark.parametrize("seed", range(3))
def test_prime_fails_less_often_than_rloo_after_as_many_steps(learnt, seed):
    prime, rloo = learnt("PRIME", seed), learnt("RLOO", seed)
    for logged in (prime, rloo):
        assert last(logged[:8], "score/mean") <= 0.5
    assert 1 - last(prime, "score/mean", steps=20) <= 0.5 * (1 - last(rloo, "score/mean", steps=20))
