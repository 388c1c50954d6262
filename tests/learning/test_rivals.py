"""Safe RLHF keeps to its limit where PPO does not, and PRIME fails less often than what sees outcomes alone."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tiny_runs import records

import jaxrlhf
from jaxrlhf.config import PPO, RLOO, Config, override

pytestmark = [pytest.mark.seeds, pytest.mark.usefixtures("programs", "undrawn", "optimized")]


def config_of(name: str, seed: int) -> Config:
    """Safe RLHF and PRIME as they ship; PPO and RLOO with all that they have in common with those."""
    config = jaxrlhf.load("safe_rlhf_digits" if name in ("SafeRLHF", "PPO") else "prime_letters")
    given = config.algorithm
    match name:
        case "PPO":
            rival = PPO(lam=given.lam, responses_per_update=given.responses_per_update, critic=given.critic)
            config = replace(config, algorithm=rival)
        case "RLOO":
            config = replace(config, algorithm=RLOO(responses_per_update=given.responses_per_update, kl=None))
    assert type(config.algorithm).__name__ == name
    config = replace(config, name=name, seed=seed, compute_dtype="float32", devices=1)
    roles = [role if role == "actor" else f"algorithm.{role}" for role in config.trained]
    longest = config.rollout.width  # microbatches of one size, so that nothing is compiled after the first step
    return override(config, {f"{role}.tokens_per_microbatch": longest for role in roles})


def learnt(name: str, seed: int, folder: Path) -> list[dict]:
    """The metrics of a rival's run from a seed."""
    workdir = folder / f"{name}_{seed}"
    assert jaxrlhf.run(replace(config_of(name, seed), workdir=str(workdir))).finished
    logged = records(workdir / "metrics.jsonl")
    assert len({record["compile/count"] for record in logged}) == 1
    return logged


def last(logged: list[dict], name: str, *, steps: int = 8) -> float:
    """Mean over the last steps."""
    return float(np.mean([record[name] for record in logged[-steps:]]))


@pytest.mark.parametrize("seed", range(3))
def test_safe_rlhf_meets_its_limit_and_keeps_the_reward(seed, tmp_path):
    safe, greedy = learnt("SafeRLHF", seed, tmp_path), learnt("PPO", seed, tmp_path)
    assert last(greedy, "score/format_3") >= 0.8, "PPO is to be tempted by what costs"
    assert last(safe, "cost/mean") <= 0.1
    for logged in (safe, greedy):
        assert logged[0]["score/format"] <= 0.4
        assert last(logged, "score/format") >= 0.9
    assert last(safe, "cost/unsafe_fraction") == pytest.approx(last(safe, "cost/mean"))


def test_prime_fails_half_as_often_as_rloo_after_as_many_steps(tmp_path):
    failed = {}
    for name in ("PRIME", "RLOO"):
        of_seeds = [learnt(name, seed, tmp_path) for seed in range(3)]
        assert all(last(logged[:8], "score/mean") <= 0.5 for logged in of_seeds)
        failed[name] = [1 - last(logged, "score/mean", steps=20) for logged in of_seeds]
    # One seed can be lucky or not: its first right responses come sooner or later.
    assert np.mean(failed["PRIME"]) <= 0.5 * np.mean(failed["RLOO"])
