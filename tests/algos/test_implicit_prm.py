"""Implicit process rewards: recorded vectors, loops over tokens as oracles, packed rows, and what must not leak."""

import json
import math
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from jaxrlhf import algos
from jaxrlhf.algos import TokenOutput

_VECTORS = json.loads((Path(__file__).parents[1] / "golden" / "vectors.json").read_text())
_EXPECTED = {name: np.asarray(value) for name, value in _VECTORS["expected"].items() if name.startswith("process/")}
_INPUTS = {name: np.asarray(value) for name, value in _VECTORS["inputs"].items()}
_MASK, _PROMPT = _INPUTS["whole_mask"] == 1, _INPUTS["prompt_id"]
_CLOSE = {"float64": {"rtol": 2e-8, "atol": 2e-9}, "float32": {"rtol": 3e-5, "atol": 3e-6}}
_SETTINGS = SimpleNamespace(beta=0.05)


@pytest.fixture(params=["float64", "float32"])
def dtype(request):
    with jax.enable_x64(request.param == "float64"):
        yield request.param


def at_the_end(score_B, mask_BT):
    """Each score at the last token of its row's mask."""
    reward_BT = np.zeros(mask_BT.shape)
    for row, mask in enumerate(mask_BT):
        if mask.any():
            reward_BT[row, np.flatnonzero(mask)[-1]] = score_B[row]
    return reward_BT


def test_returns_and_advantages_as_recorded(dtype):
    ratio = np.where(_MASK, _INPUTS["logp"] - _INPUTS["ref_logp"], np.nan).astype(dtype)
    outcome = at_the_end(_INPUTS["score"], _MASK).astype(dtype)

    def returns(outcome, ratio):
        return algos.process_returns(outcome, ratio, _MASK, _PROMPT, gamma=0.9)

    for run in (returns, jax.jit(returns)):
        got = run(outcome, ratio)
        assert got.dtype == dtype
        np.testing.assert_allclose(got, _EXPECTED["process/return"], **_CLOSE[dtype])
        np.testing.assert_allclose(algos.whiten(got, _MASK), _EXPECTED["process/advantage"], **_CLOSE[dtype])


def test_the_loss_of_outcomes_as_recorded_and_its_gradient_by_hand(dtype):
    right_B = _INPUTS["score"] > 0.5
    logp = np.where(_MASK, _INPUTS["logp"], -np.inf).astype(dtype)
    fields = {
        "ref_logp": np.where(_MASK, _INPUTS["ref_logp"], np.nan).astype(dtype),
        "outcome": np.where(_MASK, right_B[:, None], np.nan).astype(dtype),
        "segment": np.where(_MASK, 3, 0).astype(np.int32),
    }
    weight = algos.token_weights(_MASK, aggregation="seq-mean-token-mean").astype(dtype)

    def loss(logp):
        return algos.outcome_objective(TokenOutput(logp), _MASK, weight, fields, _SETTINGS).loss.sum()

    logit_B = 0.05 * np.where(_MASK, _INPUTS["logp"] - _INPUTS["ref_logp"], 0).sum(axis=1)
    slope_B = 0.05 * (1 / (1 + np.exp(-logit_B)) - right_B) / len(right_B)
    value, slope = jax.jit(jax.value_and_grad(loss))(logp)
    np.testing.assert_allclose(value, _EXPECTED["process/loss"], **_CLOSE[dtype])
    np.testing.assert_allclose(slope, np.where(_MASK, slope_B[:, None], 0), **_CLOSE[dtype])


def made(seed=0):
    """Nine responses to four prompts, out of order: one alone, one with nothing trained, masks with holes."""
    draw = np.random.default_rng(seed)
    mask = draw.random((9, 8)) < 0.6
    mask[4] = False
    group = np.array([2**40, 7, 2**40, 7, 7, 2**40 + 2**33, 1, 1, 7])
    return mask, group, draw.normal(size=9), draw.normal(size=mask.shape)


def test_token_rewards_are_relative_to_the_other_responses():
    mask, group, _, reward = made()
    got = algos.leave_one_out_rewards(np.where(mask, reward, np.nan).astype(np.float32), mask, group)
    for row in range(len(mask)):
        others = [other for other in range(len(mask)) if group[other] == group[row] and mask[other].any()]
        means = [np.mean(reward[other][mask[other]]) for other in others]
        for token in range(mask.shape[1]):
            wanted = 0.0
            if mask[row, token] and len(others) > 1:
                wanted = (len(others) * reward[row, token] - sum(means)) / (len(others) - 1)
            assert got[row, token] == pytest.approx(wanted, abs=1e-5)


def test_a_reward_at_the_end_alone_gives_the_leave_one_out_advantage():
    mask, group, score, _ = made(1)
    scorable = mask.any(axis=1)
    nothing, outcome = np.zeros(mask.shape, np.float32), at_the_end(score, mask).astype(np.float32)
    got = algos.process_returns(outcome, nothing, mask, group, gamma=0.9)
    wanted = algos.to_tokens(algos.rloo(score.astype(np.float32), scorable, group), mask)
    np.testing.assert_allclose(got, wanted, atol=1e-5)
    assert np.abs(wanted).max() > 0.5


def test_normalized_rewards_have_no_sum_to_the_end_above_one():
    mask, _, _, reward = made(2)
    given = np.where(mask, 1e3 * reward, np.inf).astype(np.float32)
    got = np.asarray(algos.normalized_rewards(given, mask))
    sums = np.cumsum(got[:, ::-1], axis=1)
    assert np.abs(sums).max() == pytest.approx(1, rel=1e-4)
    np.testing.assert_allclose(
        got * np.abs(np.cumsum(np.where(mask, given, 0)[:, ::-1], 1)).max(), np.where(mask, given, 0), rtol=1e-3
    )
    assert not np.asarray(algos.normalized_rewards(np.zeros(mask.shape, np.float32), mask)).any()


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_packed_responses_each_have_the_loss_of_their_own_sum(poison):
    draw = np.random.default_rng(5)
    mask = draw.random((3, 12)) < 0.7
    segment = np.array([[1] * 5 + [2] * 4 + [0] * 3, [3] * 12, [1] * 2 + [2] * 10], np.int32)
    mask &= segment > 0
    logp, ref = (np.where(mask, draw.normal(-2, 2, mask.shape), poison).astype(np.float32) for _ in range(2))
    right = draw.random((3, 4)) < 0.5
    outcome = right[np.arange(3)[:, None], segment].astype(np.float32)
    weight = np.where(mask, draw.random(mask.shape), poison).astype(np.float32)
    fields = {"ref_logp": ref, "outcome": np.where(mask, outcome, poison), "segment": segment}

    @jax.jit
    @partial(jax.grad, has_aux=True)
    def slope_and_loss(logp):
        loss = algos.outcome_objective(TokenOutput(logp), mask, weight, fields, SimpleNamespace(beta=0.5)).loss
        return loss.sum(), loss

    slope_RW, loss_RW = slope_and_loss(logp)
    for row in range(3):
        for own in set(segment[row][mask[row]].tolist()):
            tokens = np.flatnonzero(mask[row] & (segment[row] == own))
            logit = 0.5 * math.fsum(float(logp[row, t]) - float(ref[row, t]) for t in tokens)
            chance = 1 / (1 + math.exp(-logit))
            wanted = -math.log(chance if right[row, own] else 1 - chance)
            slope = 0.5 * (chance - right[row, own]) * float(weight[row][tokens].sum())
            np.testing.assert_allclose(loss_RW[row][tokens], weight[row][tokens] * wanted, rtol=2e-4)
            np.testing.assert_allclose(slope_RW[row][tokens], slope, rtol=2e-4, atol=1e-6)
    assert not np.asarray(loss_RW)[~mask].any() and not np.asarray(slope_RW)[~mask].any()
