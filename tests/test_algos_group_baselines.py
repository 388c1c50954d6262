"""Baselines of groups and choices of tokens: reference values of other implementations, and loops as oracles."""

import json
import math
import statistics
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxrlhf import algos
from jaxrlhf.algos.objectives import TokenOutput
from jaxrlhf.config import GRPO, ClipCovLoss, DPPOLoss, GMPOLoss, KLCovLoss

HERE = Path(__file__).parent
INPUTS = json.loads((HERE / "golden_vectors.json").read_text())["inputs"]
GRPO_ADVANTAGE = np.asarray(json.loads((HERE / "golden_vectors.json").read_text())["expected"]["group/grpo"])
GOLDEN = json.loads((HERE / "golden_zoo.json").read_text())
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
def test_the_best_of_a_group_and_the_share_of_success_equal_loops(seed):
    score, scorable, group = group_batch(seed)
    best, share = np.zeros(10), np.zeros(10)
    for i in np.flatnonzero(scorable):
        own = [float(score[j]) for j in members(scorable, group, i)]
        first, *rest = sorted(own, reverse=True)
        if rest and score[i] == first:
            best[i] = first - rest[0]
        share[i] = (score[i] - statistics.fmean(own)) / (statistics.fmean(own) + 1e-6)
    np.testing.assert_allclose(algos.best_of_group(score, scorable, group, normalize_std=False), best, **CLOSE)
    np.testing.assert_allclose(algos.mean_relative(score, scorable, group), share, **CLOSE)
    same = np.full(10, np.float32(0.1))
    for estimate in (algos.mean_relative, lambda *of: algos.best_of_group(*of, normalize_std=True)):
        np.testing.assert_array_equal(estimate(same, scorable, group), 0)


def test_rewards_are_normalised_one_by_one_and_their_sum_over_the_batch():
    first, scorable, group = group_batch(1)
    second = np.where(scorable, np.random.default_rng(2).integers(0, 2, 10), math.nan).astype(np.float32)
    total = np.zeros(10)
    for weight, part in ((0.5, first), (2.0, second)):
        for i in np.flatnonzero(scorable):
            own = [float(part[j]) for j in members(scorable, group, i)]
            if len(set(own)) > 1:
                total[i] += weight * (part[i] - statistics.fmean(own)) / (statistics.stdev(own) + 1e-6)
    wanted = np.where(scorable, (total - total[scorable].mean()) / total[scorable].std(ddof=1), 0)
    found = algos.decoupled(np.stack([first, second]), np.array([0.5, 2.0]), scorable, group)
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


def test_the_optimal_token_baseline_counts_tokens_over_turns_as_recorded():
    energy = 1 - 2 * np.exp(given("old_logp")) + np.asarray(GOLDEN["sum_pi_squared"])
    found = algos.optimal_token_baseline(given("reward"), energy, MASK, PROMPT)
    np.testing.assert_allclose(found, GOLDEN["group/optimal_token_baseline"], **CLOSE)
    assert found[2, 6] == 0, "no other response of the group has a seventh token"
    alone = algos.optimal_token_baseline(given("reward"), energy, MASK, np.arange(6))
    np.testing.assert_array_equal(alone, 0)


@pytest.mark.parametrize(
    "name, policy",
    [
        ("gmpo", GMPOLoss(clip_low=0.05, clip_high=0.08)),
        ("dppo", DPPOLoss(limit_low=0.05, limit_high=0.05)),
        ("kl_cov", KLCovLoss(share=0.2, coefficient=0.5)),
    ],
)
def test_losses_and_gradients_are_the_recorded_ones(name, policy):
    advantage = np.where(MASK, GRPO_ADVANTAGE, math.nan).astype(np.float32)
    fields = {"old_logp": given("old_logp"), "advantage": advantage, "segment": np.full(MASK.shape, 3, np.int32)}
    if policy.selection:
        chosen = algos.largest(GRPO_ADVANTAGE, given("logp", 0.0), MASK, np.random.default_rng(0), policy)
        assert chosen.sum() == int(0.2 * MASK.sum())
        fields["chosen"] = chosen.astype(np.float32)
    weight = algos.token_weights(MASK, aggregation=policy.aggregation)

    def loss(logp):
        return algos.policy_objective(TokenOutput(logp), MASK, weight, fields, GRPO(policy=policy)).loss.sum()

    value, slope = jax.jit(jax.value_and_grad(loss))(given("logp", -math.inf))
    np.testing.assert_allclose(value, GOLDEN[f"policy/{name}/loss"], **CLOSE)
    np.testing.assert_allclose(slope, np.where(MASK, GOLDEN[f"policy/{name}/gradient"], 0), **CLOSE)


def test_clip_cov_leaves_out_tokens_of_a_covariance_in_the_range():
    rng = np.random.default_rng(3)
    advantage, logp, mask = rng.normal(size=(20, 30)), -rng.exponential(size=(20, 30)), rng.random((20, 30)) < 0.7
    policy = ClipCovLoss(share=0.02, covariance_low=0.5, covariance_high=2.0)
    chosen = algos.drawn_in_range(advantage, logp, mask, np.random.default_rng(0), policy)
    mean = advantage[mask].mean(), logp[mask].mean()
    cov = (advantage - mean[0]) * (logp - mean[1])
    assert chosen.sum() == int(0.02 * mask.sum())
    assert (mask & (cov > 0.5) & (cov < 2.0))[chosen].all()
    other = algos.drawn_in_range(advantage, logp, mask, np.random.default_rng(1), policy)
    assert (chosen != other).any(), "the choice is drawn"
    assert not algos.drawn_in_range(advantage, logp, np.zeros_like(mask), np.random.default_rng(0), policy).any()

    given = {"old_logp": logp, "advantage": advantage, "chosen": chosen}
    fields = {name: array.astype(np.float32) for name, array in given.items()}
    weight = algos.token_weights(mask, aggregation="token-mean")

    def loss(logp):
        return algos.policy_objective(TokenOutput(logp), mask, weight, fields, GRPO(policy=policy)).loss.sum()

    slope = jax.jit(jax.grad(loss))(fields["old_logp"])
    np.testing.assert_allclose(slope, np.where(mask & ~chosen, -weight * advantage, 0), rtol=1e-5, atol=1e-9)
    with pytest.raises(ValueError, match="needs the field 'chosen'"):
        fields.pop("chosen")
        loss(fields["old_logp"])


def test_each_player_gains_what_the_other_loses():
    turn = np.array([[0, 0, 1, 2, 3, -1], [0, 1, 1, -1, -1, -1]])
    reward = np.array([[0, 1, 0, 0, 5, 9], [0, 0, -2, 7, 7, 7]], np.float32)
    np.testing.assert_array_equal(algos.player_gains(reward, turn >= 0, turn), [[-4, 4], [2, -2]])
