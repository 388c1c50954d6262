"""Rollout correction: weights and metrics against loops over responses, and the traps of ratios."""

import math

import jax
import numpy as np
import pytest

from jaxrlhf import algos
from jaxrlhf.config import IcePop, Rejection, TruncatedImportance

_LENGTHS = [24, 1, 0, 7, 12, 3]
_IMPORTANCE = [
    None,
    TruncatedImportance(cap=1.2),
    TruncatedImportance(cap=1.2, level="sequence"),
    IcePop(low=0.8, high=1.25),
]
_LIMITS = {
    ("k1", "token"): 0.2,
    ("k1", "sequence-mean"): 0.05,
    ("k1", "sequence-sum"): 0.3,
    ("k1", "sequence-max"): 0.35,
    ("k2", "token"): 0.02,
    ("k2", "sequence-mean"): 0.025,
    ("k2", "sequence-sum"): 0.2,
    ("k2", "sequence-max"): 0.06,
    ("k3", "token"): 0.02,
    ("k3", "sequence-mean"): 0.025,
    ("k3", "sequence-sum"): 0.2,
    ("k3", "sequence-max"): 0.06,
}
_REJECTIONS = [Rejection(*which, high=high) for which, high in _LIMITS.items()]
_REJECTIONS += [Rejection("k1", "sequence-mean", high=0.06, low=-0.01), Rejection("k1", "token", high=0.1, low=-0.3)]


def batch(poison=math.nan, *, seed=3, scale=0.2):
    """Two policies' log-probabilities of responses with holes, one without any trained token."""
    rng = np.random.default_rng(seed)
    mask = np.zeros((len(_LENGTHS), 30), bool)
    for row, length in enumerate(_LENGTHS):
        mask[row, np.sort(rng.choice(30, length, replace=False))] = True
    sampler = -rng.exponential(size=mask.shape)
    old = sampler + scale * rng.normal(size=mask.shape)
    return (*(np.where(mask, x, poison).astype(np.float32) for x in (old, sampler)), mask)


@pytest.fixture(autouse=True)
def not_compiled():
    """Every combination of settings is a program of its own; the recorded vectors are compared with those."""
    with jax.disable_jit():
        yield


def inside(rejection, log_ratio):
    """Return the mask of the tokens of one response that a rejection keeps."""
    if not log_ratio:
        return []
    estimate = {
        "k1": [-r for r in log_ratio],
        "k2": [r * r / 2 for r in log_ratio],
        "k3": [math.exp(r) - 1 - r for r in log_ratio],
    }[rejection.estimator]
    low = -rejection.high if rejection.low is None else rejection.low
    if rejection.level == "sequence-mean":
        estimate = [math.fsum(estimate) / len(estimate)] * len(estimate)
    if rejection.level == "sequence-sum":
        estimate = [math.fsum(estimate)] * len(estimate)
    kept = [low <= e <= rejection.high for e in estimate]
    return [all(kept)] * len(kept) if rejection.level == "sequence-max" else kept


def oracle(importance, rejection, log_ratio):
    """Weight of each token of one response, whether it is kept, and whether the cap binds."""
    kept = [
        all(each) for each in zip([True] * len(log_ratio), *(inside(r, log_ratio) for r in rejection), strict=False)
    ]
    for r, ok in zip(log_ratio, kept, strict=True):
        match importance:
            case TruncatedImportance(cap, level):
                ratio = math.exp(r if level == "token" else max(-20.0, min(20.0, math.fsum(log_ratio))))
                yield min(ratio, cap) if ok else 0.0, ok, ratio > cap
            case IcePop(low, high):
                ok = ok and low <= math.exp(r) <= high
                yield math.exp(r) if ok else 0.0, ok, False
            case None:
                yield float(ok), ok, False


def compared(importance, rejection):
    """The function against the oracle; returns the share of the tokens that is rejected."""
    old, sampler, mask = batch()
    wanted, kept, capped, responses = np.zeros(mask.shape), [], [], []
    for row in range(len(mask)):
        log_ratio = [float(a) - float(b) for a, b in zip(old[row][mask[row]], sampler[row][mask[row]], strict=True)]
        found = list(oracle(importance, rejection, log_ratio))
        wanted[row][mask[row]] = [weight for weight, _, _ in found]
        kept += [ok for _, ok, _ in found]
        capped += [bound for _, _, bound in found]
        responses += [not any(ok for _, ok, _ in found)] if found else []
    got = algos.rollout_correction(old, sampler, mask, importance=importance, rejection=rejection)
    np.testing.assert_allclose(got.weight_BT, wanted, rtol=1e-5)
    weight = wanted[mask]
    metrics = {
        "correction/weight_mean": weight.mean(),
        "correction/weight_max": weight.max(),
        "correction/effective_fraction": weight.mean() ** 2 / np.mean(weight**2) if weight.any() else 0.0,
        "correction/capped_fraction": np.mean(capped),
        "correction/rejected_tokens": 1 - np.mean(kept),
        "correction/rejected_responses": np.mean(responses),
    }
    assert got.metrics.keys() == metrics.keys()
    for name, value in metrics.items():
        np.testing.assert_allclose(got.metrics[name], value, rtol=1e-4, atol=1e-6, err_msg=name)
    return 1 - np.mean(kept), np.mean(capped)


@pytest.mark.parametrize("importance", _IMPORTANCE, ids=str)
def test_weights_and_metrics_equal_a_loop(importance):
    rejected, capped = compared(importance, ())
    assert (0 < rejected < 1) == isinstance(importance, IcePop)
    assert (0 < capped < 1) == isinstance(importance, TruncatedImportance)


@pytest.mark.parametrize("rejection", _REJECTIONS, ids=str)
def test_rejections_equal_a_loop(rejection):
    rejected, _ = compared(TruncatedImportance(cap=1.2), (rejection,))
    assert 0 < rejected < 1, "the data no longer has tokens of both kinds"


def test_every_rejection_applies():
    both = _REJECTIONS[0], _REJECTIONS[2]
    rejected, _ = compared(None, both)
    assert rejected > max(compared(None, (each,))[0] for each in both)


@pytest.mark.parametrize("poison", [-math.inf, math.inf, 1e30])
def test_what_lies_outside_the_mask_changes_nothing(poison):
    for importance in _IMPORTANCE:
        settings = {"importance": importance, "rejection": tuple(_REJECTIONS[1:3])}
        clean, dirty = (algos.rollout_correction(*batch(p), **settings) for p in (math.nan, poison))
        for got, wanted in zip(jax.tree.leaves(dirty), jax.tree.leaves(clean), strict=True):
            assert np.isfinite(got).all()
            np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("who", [0, 1], ids=["trainer", "sampler"])
def test_a_token_that_one_policy_rules_out_has_a_bounded_weight_and_is_rejected(who):
    arrays = batch()
    at = tuple(np.argwhere(arrays[2])[0])
    arrays[who][at] = -math.inf
    other_rows = np.arange(len(_LENGTHS)) != at[0]
    for importance in _IMPORTANCE:
        weight = np.asarray(algos.rollout_correction(*arrays, importance=importance).weight_BT)
        assert np.isfinite(weight).all()
        assert weight.max() <= 1.25 + 1e-6
        before = algos.rollout_correction(*batch(), importance=importance).weight_BT
        np.testing.assert_array_equal(weight[other_rows], np.asarray(before)[other_rows])
    for rejection in _REJECTIONS:
        assert np.asarray(algos.rollout_correction(*arrays, importance=None, rejection=(rejection,)).weight_BT)[at] == 0
    assert np.asarray(algos.rollout_correction(*arrays, importance=IcePop()).weight_BT)[at] == 0


@pytest.mark.parametrize("importance", _IMPORTANCE, ids=str)
def test_policies_that_agree_leave_every_weight_at_one(importance):
    old, _, mask = batch()
    got = algos.rollout_correction(old, old, mask, importance=importance, rejection=tuple(_REJECTIONS))
    np.testing.assert_array_equal(got.weight_BT, mask)
    values = {name.removeprefix("correction/"): float(value) for name, value in got.metrics.items()}
    assert values == {
        "weight_mean": 1,
        "weight_max": 1,
        "effective_fraction": 1,
        "capped_fraction": 0,
        "rejected_tokens": 0,
        "rejected_responses": 0,
    }


@pytest.mark.parametrize("importance", _IMPORTANCE, ids=str)
def test_a_batch_without_trained_tokens_has_weights_and_metrics_of_zero(importance):
    old, sampler, mask = batch()
    got = algos.rollout_correction(
        old, sampler, np.zeros_like(mask), importance=importance, rejection=tuple(_REJECTIONS)
    )
    for value in jax.tree.leaves(got):
        assert not np.asarray(value).any()


def test_nothing_differentiates_through_the_weights():
    old, sampler, mask = batch(0.0)

    def total(x):
        return algos.rollout_correction(x, sampler, mask, importance=_IMPORTANCE[1]).weight_BT.sum()

    assert not np.asarray(jax.grad(total)(old)).any()


def test_alike_weights_are_all_effective_and_no_more_than_that():
    old = np.full((4, 300), -2.0, np.float32)
    mask = np.ones_like(old, bool)
    with jax.disable_jit(False):
        for gap in np.linspace(0.01, 1, 50, dtype=np.float32):
            got = algos.rollout_correction(old, old - gap, mask, importance=TruncatedImportance(cap=10.0))
            assert 1 - 1e-6 < float(got.metrics["correction/effective_fraction"]) <= 1
