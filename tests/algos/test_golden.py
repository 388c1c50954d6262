"""The algorithms against recorded vectors of other implementations, eager and compiled.

The vectors (two prompts of three responses, masks with holes, float64) come from executing
verl, NeMo-RL, OpenRLHF and slime, or a numpy reference that was asserted equal to them. Every
position outside the mask is poisoned before a function sees it.
"""

import json
import math
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxrlhf import algos
from jaxrlhf.algos.objectives import TokenOutput
from jaxrlhf.config import (
    GRPO,
    CISPOLoss,
    GSPOLoss,
    IcePop,
    KLInLoss,
    PolicyLoss,
    Rejection,
    SAPOLoss,
    TruncatedImportance,
    ValueLoss,
)

_VECTORS = json.loads((Path(__file__).parents[1] / "golden" / "vectors.json").read_text())
_EXPECTED = {name: np.asarray(value) for name, value in _VECTORS["expected"].items()}
_MASK = np.asarray(_VECTORS["inputs"]["mask"]) == 1
_PROMPT = np.asarray(_VECTORS["inputs"]["prompt_id"])
_MODES = ["token-mean", "token-sum", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]

# The recorded means divide by n + 1e-8, which shows in the tenth digit.
_CLOSE = {"float64": {"rtol": 2e-8, "atol": 1e-9}, "float32": {"rtol": 2e-5, "atol": 2e-6}}


@pytest.fixture(params=["float64", "float32"])
def dtype(request):
    with jax.enable_x64(request.param == "float64"):
        yield request.param


def given(name, dtype, *, poison=np.nan):
    """A recorded input, with `poison` wherever the mask is off."""
    value = np.asarray(_VECTORS["inputs"][name], dtype)
    return np.where(_MASK, value, poison).astype(dtype) if value.ndim == 2 else value


def expected_masked(name, dtype):
    return np.where(_MASK, _EXPECTED[name], 0).astype(dtype)


def check(function, arrays, wanted, dtype, **tolerance):
    """`function(*arrays)` equals `wanted`, eagerly and compiled, in the asked precision."""
    for run in (function, jax.jit(function)):
        got = run(*arrays)
        assert got.dtype == dtype
        np.testing.assert_allclose(got, wanted, **_CLOSE[dtype] | tolerance)


@partial(jax.jit, static_argnames="settings")
def loss_and_gradient(logp, entropy, weight, fields, *, settings):
    def loss(logp):
        return algos.policy_objective(TokenOutput(logp, entropy), _MASK, weight, fields, settings).loss.sum()

    return jax.value_and_grad(loss)(logp)


def check_objective(name, weight, fields, settings, dtype, **tolerance):
    """The policy's objective, which trainers compile, has the recorded sum, and its gradient is the recorded one."""
    logp, entropy = given("logp", dtype, poison=-np.inf), np.full(_MASK.shape, np.nan, dtype)
    loss, gradient = loss_and_gradient(logp, entropy, weight.astype(dtype), fields, settings=settings)
    assert (loss.dtype, gradient.dtype) == (dtype, dtype)
    np.testing.assert_allclose(loss, _EXPECTED[f"{name}/loss"], **_CLOSE[dtype] | tolerance)
    np.testing.assert_allclose(gradient, _EXPECTED[f"{name}/gradient"], **_CLOSE[dtype])


def test_gae_advantages_and_returns(dtype):
    arrays = given("reward", dtype), given("old_value", dtype, poison=np.inf), _MASK
    for field, name in enumerate(["gae/advantage", "gae/return"]):
        check(lambda *a, f=field: algos.gae(*a, gamma=0.99, lam=0.95)[f], arrays, expected_masked(name, dtype), dtype)
    check(
        lambda *a: algos.whiten(algos.gae(*a, gamma=0.99, lam=0.95).advantage_BT, _MASK),
        arrays,
        _EXPECTED["gae/whitened"],
        dtype,
    )


def test_gae_monte_carlo_return_and_full_mask(dtype):
    value, reward = (np.asarray(_VECTORS["inputs"][name], dtype) for name in ("old_value", "reward"))
    monte_carlo = algos.gae(reward, value, _MASK, gamma=1.0, lam=1.0).return_BT
    np.testing.assert_allclose(monte_carlo, expected_masked("gae/monte_carlo_return", dtype), **_CLOSE[dtype])
    full = algos.gae(reward, value, np.ones_like(_MASK), gamma=0.99, lam=0.95).advantage_BT
    np.testing.assert_allclose(full, _EXPECTED["gae/unmasked"], **_CLOSE[dtype])


def test_vapo_looks_further_ahead_the_longer_a_response_is(dtype):
    lam = algos.length_adaptive_lambda(_MASK.sum(axis=1), scale=0.4)
    np.testing.assert_allclose(lam, _EXPECTED["vapo/lambda"], rtol=1e-6)
    arrays = given("reward", dtype), given("old_value", dtype, poison=np.inf), _MASK, lam.astype(dtype)
    wanted = expected_masked("vapo/advantage", dtype), expected_masked("vapo/return", dtype)
    check(lambda r, v, m, lam: algos.gae(r, v, m, gamma=1.0, lam=lam).advantage_BT, arrays, wanted[0], dtype)
    check(lambda r, v, m, lam: algos.gae(r, v, m, gamma=1.0, lam=1.0).return_BT, arrays, wanted[1], dtype, atol=1e-6)


def test_discounted_returns(dtype):
    arrays = (given("reward", dtype),)

    def returns(reward):
        return algos.discounted_returns(reward, _MASK, gamma=0.9)

    check(returns, arrays, _EXPECTED["returns/discounted"], dtype)
    check(lambda reward: algos.whiten(returns(reward), _MASK), arrays, _EXPECTED["returns/whitened"], dtype)


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo"])
def test_group_advantages(name, dtype):
    estimate = {
        "grpo": lambda *a: algos.group_relative(*a, normalize_std=True),
        "dr_grpo": lambda *a: algos.group_relative(*a, normalize_std=False),
        "rloo": algos.rloo,
    }[name]
    arrays = given("score", dtype), np.ones(6, bool), _PROMPT
    check(lambda *a: algos.to_tokens(estimate(*a), _MASK), arrays, _EXPECTED[f"group/{name}"], dtype)


def test_whitened_group_mean_and_greedy_baseline(dtype):
    def whitened(score):
        centred = algos.group_relative(score, np.ones(6, bool), _PROMPT, normalize_std=False)
        return algos.whiten(algos.to_tokens(centred, _MASK), _MASK)

    score = given("score", dtype)
    check(whitened, (score,), _EXPECTED["group/whitened"], dtype)
    baseline = given("greedy_score", dtype)
    check(lambda s: algos.to_tokens(s - baseline, _MASK), (score,), _EXPECTED["group/remax"], dtype)


@pytest.mark.parametrize("estimator", ["k1", "abs", "k2", "k3"])
def test_kl_estimates(estimator, dtype):
    def estimate(logp, ref_logp):
        kl = algos.kl_estimate(algos.selected(logp, _MASK), algos.selected(ref_logp, _MASK), estimator=estimator)
        return algos.selected(kl, _MASK)

    arrays = given("logp", dtype), given("ref_logp", dtype, poison=-np.inf)
    check(estimate, arrays, expected_masked(f"kl/{estimator}", dtype), dtype)


@pytest.mark.parametrize("estimator, value, gradient", [("k1+", "k1", "k2"), ("k3+", "k3", "k2")])
def test_straight_through_kl_has_one_value_and_another_gradient(estimator, value, gradient, dtype):
    logp, ref_logp = given("logp", dtype, poison=-1.0), given("ref_logp", dtype, poison=-2.0)

    def total(name):
        return lambda x: algos.kl_estimate(x, ref_logp, estimator=name).sum()

    np.testing.assert_allclose(total(estimator)(logp), total(value)(logp), **_CLOSE[dtype])
    np.testing.assert_allclose(jax.grad(total(estimator))(logp), logp - ref_logp, **_CLOSE[dtype])
    np.testing.assert_allclose(jax.grad(total(gradient))(logp), logp - ref_logp, **_CLOSE[dtype])


def test_adaptive_kl_coefficient():
    for wanted, before, kl in zip(
        _EXPECTED["kl/adaptive"], [0.2, *_EXPECTED["kl/adaptive"][:-1]], [6.0, 12.0, 3.0, 7.0], strict=True
    ):
        after = algos.adaptive_kl_coefficient(float(before), kl, target=6.0, horizon=10_000, sequences=256)
        assert after == pytest.approx(wanted, rel=1e-12)


def test_token_rewards_and_overlong_penalty(dtype):
    old_logp, ref_logp = given("old_logp", dtype), given("ref_logp", dtype)

    def reward(score, kl):
        return algos.token_rewards(score, kl, _MASK, kl_coefficient=0.1)

    kl = algos.kl_estimate(old_logp, ref_logp, estimator="k1")
    check(reward, (given("score", dtype), kl), _EXPECTED["shaping/reward"], dtype)
    length = np.asarray([10, 15, 16, 18, 20, 25], np.int32)
    penalty = algos.overlong_penalty(length, max_tokens=20, buffer_tokens=5, factor=1.0)
    np.testing.assert_allclose(penalty, _EXPECTED["shaping/overlong"], **_CLOSE[dtype])


@pytest.mark.parametrize(
    "name, importance, rejection",
    [
        ("truncated", TruncatedImportance(cap=1.03), ()),
        ("truncated_sequence", TruncatedImportance(cap=1.05, level="sequence"), ()),
        ("icepop", IcePop(low=0.95, high=1.05), ()),
        ("kept", None, (Rejection("k1", "sequence-mean", low=-math.log(1.02), high=-math.log(0.98)),)),
    ],
)
def test_rollout_correction(name, importance, rejection, dtype):
    arrays = given("old_logp", dtype), given("sampler_logp", dtype, poison=-np.inf), _MASK

    def weigh(*a):
        return algos.rollout_correction(*a, importance=importance, rejection=rejection).weight_BT

    check(weigh, arrays, expected_masked(f"correction/{name}", dtype), dtype)


@pytest.mark.parametrize("mode", _MODES)
def test_policy_loss_and_gradient(mode, dtype):
    settings = GRPO(policy=PolicyLoss(clip_low=0.2, clip_high=0.28, dual_clip=3.0))
    fields = {"old_logp": given("old_logp", dtype), "advantage": _poisoned(_EXPECTED["gae/whitened"], dtype)}
    check_objective(f"policy/{mode}", algos.token_weights(_MASK, aggregation=mode, horizon=7), fields, settings, dtype)


@pytest.mark.parametrize(
    "name, loss_settings",
    [
        ("gspo", GSPOLoss(clip_low=0.05, clip_high=0.05)),
        ("cispo", CISPOLoss(ratio_low=0.8, ratio_high=1.28)),
        ("sapo", SAPOLoss(temperature_positive=1.0, temperature_negative=1.05)),
    ],
)
def test_other_policy_losses_and_their_gradients(name, loss_settings, dtype):
    fields = {
        "old_logp": given("old_logp", dtype),
        "advantage": _poisoned(_EXPECTED["group/grpo"], dtype),
        "segment": np.full(_MASK.shape, 3, np.int32),
    }
    weight = algos.token_weights(_MASK, aggregation=loss_settings.aggregation)
    # In the sum the responses' losses cancel, and the n + 1e-8 of the recorded means show sooner.
    atol = 1e-8 if dtype == "float64" else 2e-6
    check_objective(f"policy/{name}", weight, fields, GRPO(policy=loss_settings), dtype, atol=atol)


def test_policy_metrics(dtype):
    fields = {"old_logp": given("old_logp", dtype), "advantage": _poisoned(_EXPECTED["gae/whitened"], dtype)}
    settings = GRPO(policy=PolicyLoss(clip_low=0.2, clip_high=0.28, dual_clip=3.0))
    output = TokenOutput(given("logp", dtype), given("logp", dtype))
    metrics = algos.policy_objective(output, _MASK, np.zeros(_MASK.shape, dtype), fields, settings).metrics
    for name in ("policy/clip_fraction", "policy/clip_fraction_lower", "policy/kl_old"):
        np.testing.assert_allclose(algos.masked_mean(metrics[name], _MASK), _EXPECTED[name], **_CLOSE[dtype])


def test_kl_in_loss_and_entropy_bonus_add_their_own_weighted_sums(dtype):
    mode = "token-mean"
    settings = GRPO(
        policy=PolicyLoss(clip_high=0.28, aggregation=mode, entropy_coefficient=0.01), kl=KLInLoss(coefficient=0.1)
    )
    weight = algos.token_weights(_MASK, aggregation=mode)
    fields = {
        "old_logp": given("old_logp", dtype),
        "advantage": _poisoned(_EXPECTED["gae/whitened"], dtype),
        "ref_logp": given("ref_logp", dtype),
        "kl_weight": 0.1 * weight,
        "entropy_weight": 0.01 * weight,
    }
    entropy = np.where(_MASK, 0.5, np.nan).astype(dtype)

    loss, slope = loss_and_gradient(given("logp", dtype), entropy, weight, fields, settings=settings)
    tokens = _MASK.sum()
    wanted = _EXPECTED["policy/token-mean/loss"] + 0.1 * _EXPECTED["kl/k3"].sum() / tokens - 0.01 * 0.5
    np.testing.assert_allclose(loss, wanted, **_CLOSE[dtype])
    difference = np.where(_MASK, _VECTORS["inputs"]["logp"], 0) - np.where(_MASK, _VECTORS["inputs"]["ref_logp"], 0)
    gradient = _EXPECTED["policy/token-mean/gradient"] + 0.1 * (1 - np.exp(-difference)) / tokens
    np.testing.assert_allclose(slope, gradient, **_CLOSE[dtype])


def test_value_loss(dtype):
    fields = {"old_value": given("old_value", dtype), "returns": _poisoned(_EXPECTED["gae/return"], dtype)}
    weight = algos.token_weights(_MASK, aggregation="token-mean")

    def objective(value):
        return algos.value_objective(value, _MASK, weight, fields, ValueLoss(clip=0.2))

    terms = jax.jit(objective)(given("value", dtype))
    np.testing.assert_allclose(terms.loss.sum(), _EXPECTED["value/loss"], **_CLOSE[dtype])
    clipped = algos.masked_mean(terms.metrics["value/clip_fraction"], _MASK)
    np.testing.assert_allclose(clipped, _EXPECTED["value/clip_fraction"], **_CLOSE[dtype])


def _poisoned(value, dtype):
    return np.where(_MASK, value, np.nan).astype(dtype)
