"""Baselines of groups and policy losses: reference values of other implementations, and loops as oracles."""

import json
import math
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxrlhf import algos
from jaxrlhf.algos.objectives import TokenOutput
from jaxrlhf.config import GRPO, DPPOLoss, GMPOLoss

GOLDEN_FILES = Path(__file__).parents[1] / "golden"
INPUTS = json.loads((GOLDEN_FILES / "vectors.json").read_text())["inputs"]
GRPO_ADVANTAGE = np.asarray(json.loads((GOLDEN_FILES / "vectors.json").read_text())["expected"]["group/grpo"])
GOLDEN = json.loads((GOLDEN_FILES / "zoo.json").read_text())
MASK, PROMPT = np.asarray(INPUTS["mask"]) == 1, np.asarray(INPUTS["prompt_id"])
CLOSE = {"rtol": 2e-5, "atol": 2e-6}


def given(name, poison=math.nan):
    return np.where(MASK, INPUTS[name], poison).astype(np.float32)


def group_batch(seed):
    """Rows of groups of 4, 3 (equal scores), 2 and 1, shuffled; some unscorable; ids beyond 32 bits."""
    rng = np.random.default_rng(seed)
    label = rng.permutation([0, 0, 0, 0, 1, 1, 1, 2, 2, 3])
    scorable = rng.random(10) < 0.85
    score = np.where(scorable, np.where(label == 1, 0.25, rng.random(10)), math.nan).astype(np.float32)
    return score, scorable, (label.astype(np.int64) << 32) + 7


def members(scorable, group, row):
    return [int(j) for j in np.flatnonzero(scorable & (group == group[row]))]


def test_the_best_of_a_group_has_the_recorded_advantage():
    score = np.asarray(INPUTS["score"], np.float32)
    found = algos.best_of_group(score, np.ones(6, bool), PROMPT, normalize_std=True)
    np.testing.assert_allclose(algos.to_tokens(found, MASK), GOLDEN["group/passk"], **CLOSE)


@pytest.mark.parametrize("seed", range(3))
def test_the_best_of_a_group_equals_a_loop(seed):
    score, scorable, group = group_batch(seed)
    best = np.zeros(10)
    for i in np.flatnonzero(scorable):
        own = [float(score[j]) for j in members(scorable, group, i)]
        first, *rest = sorted(own, reverse=True)
        if rest and score[i] == first:
            best[i] = first - rest[0]
    np.testing.assert_allclose(algos.best_of_group(score, scorable, group, normalize_std=False), best, **CLOSE)
    same = np.full(10, np.float32(0.1))
    np.testing.assert_array_equal(algos.best_of_group(same, scorable, group, normalize_std=True), 0)


@pytest.mark.parametrize(
    "name, policy",
    [
        ("gmpo", GMPOLoss(clip_low=0.05, clip_high=0.08)),
        ("dppo", DPPOLoss(limit_low=0.05, limit_high=0.05)),
    ],
)
def test_losses_and_gradients_are_the_recorded_ones(name, policy):
    advantage = np.where(MASK, GRPO_ADVANTAGE, math.nan).astype(np.float32)
    fields = {"old_logp": given("old_logp"), "advantage": advantage, "segment": np.full(MASK.shape, 3, np.int32)}
    weight = algos.token_weights(MASK, aggregation=policy.aggregation)

    def loss(logp):
        return algos.policy_objective(TokenOutput(logp), MASK, weight, fields, GRPO(policy=policy)).loss.sum()

    value, slope = jax.jit(jax.value_and_grad(loss))(given("logp", -math.inf))
    np.testing.assert_allclose(value, GOLDEN[f"policy/{name}/loss"], **CLOSE)
    np.testing.assert_allclose(slope, np.where(MASK, GOLDEN[f"policy/{name}/gradient"], 0), **CLOSE)
