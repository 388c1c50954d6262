"""The algorithms against plain loops over random batches: holes, prompts, padding, empty rows."""

import math
import statistics

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxrlhf import algos

_CLOSE = {"rtol": 2e-5, "atol": 2e-6}
_ROWS, _WIDTH = 8, 11
_SEEDS = [0, 1, 2]


def batch(seed, *names, poison=math.nan):
    """A mask with holes (row 0 full, row 1 empty, row 2 one token) and arrays poisoned outside it."""
    rng = np.random.default_rng(seed)
    mask = rng.random((_ROWS, _WIDTH)) < 0.6
    mask[0], mask[1], mask[2] = True, False, np.arange(_WIDTH) == 4
    arrays = [np.where(mask, rng.normal(size=mask.shape), poison).astype(np.float32) for _ in names]
    return mask, *arrays


def chosen(mask_row):
    return [t for t, on in enumerate(mask_row) if on]


@pytest.mark.parametrize("seed", _SEEDS)
def test_masked_statistics(seed):
    mask, value = batch(seed, "value", poison=math.inf)
    inside = [float(v) for v in value[mask]]
    np.testing.assert_allclose(algos.masked_sum(value, mask), math.fsum(inside), **_CLOSE)
    np.testing.assert_allclose(algos.masked_mean(value, mask), statistics.fmean(inside), **_CLOSE)
    np.testing.assert_allclose(algos.masked_var(value, mask), statistics.variance(inside), **_CLOSE)
    rows = [statistics.fmean(map(float, row[on])) if on.any() else 0.0 for row, on in zip(value, mask, strict=True)]
    np.testing.assert_allclose(algos.masked_mean(value, mask, axis=1), rows, **_CLOSE)

    spread = math.sqrt(statistics.variance(inside) + 1e-8)
    white = algos.whiten(value, mask)
    wanted = [(v - statistics.fmean(inside)) / spread for v in inside]
    np.testing.assert_allclose(np.asarray(white)[mask], wanted, **_CLOSE)
    assert not np.asarray(white)[~mask].any()


@pytest.mark.parametrize("count", [0, 1])
def test_statistics_of_too_few_tokens_are_zero(count):
    mask = np.arange(4)[None] < count
    value = np.full((1, 4), 3.0, np.float32)
    assert algos.masked_var(value, mask) == 0
    assert algos.masked_mean(value, mask) == 3.0 * count
    np.testing.assert_array_equal(algos.whiten(value, mask), np.zeros((1, 4)))
    gradient = jax.grad(lambda x: algos.whiten(x, mask).sum() + algos.masked_var(x, mask))(value)
    assert np.isfinite(gradient).all()


def test_whitening_is_differentiable_through_a_poisoned_batch():
    mask, value = batch(0, "value")
    gradient = jax.grad(lambda x: jnp.square(algos.whiten(x, mask)[:, ::2]).sum())(value)
    assert np.isfinite(gradient).all()
    assert not np.asarray(gradient)[~mask].any()


@pytest.mark.parametrize("gamma, lam", [(1.0, 1.0), (0.9, 0.8), (0.99, 0.0), (0.0, 0.5)])
@pytest.mark.parametrize("seed", _SEEDS)
def test_gae_equals_a_loop_over_the_chosen_tokens_alone(seed, gamma, lam):
    mask, reward, value = batch(seed, "reward", "value")
    advantage, returns = np.zeros(mask.shape), np.zeros(mask.shape)
    for row in range(_ROWS):
        later_value = later_advantage = 0.0
        for t in reversed(chosen(mask[row])):
            delta = reward[row, t] + gamma * later_value - value[row, t]
            later_advantage = delta + gamma * lam * later_advantage
            later_value = value[row, t]
            advantage[row, t], returns[row, t] = later_advantage, later_advantage + later_value
    targets = algos.gae(reward, value, mask, gamma=gamma, lam=lam)
    np.testing.assert_allclose(targets.advantage_BT, advantage, **_CLOSE)
    np.testing.assert_allclose(targets.return_BT, returns, **_CLOSE)


def test_gae_does_not_see_a_tool_output_between_two_turns():
    reward, value = np.float32([[0, 0, 0, 1]]), np.float32([[0.1, 0.2, 0.3, 0.4]])
    whole = algos.gae(reward, value, np.ones((1, 4), bool), gamma=0.9, lam=0.7).advantage_BT
    spread = np.zeros((1, 9), np.float32), np.full((1, 9), 7.0, np.float32)
    places = [1, 2, 5, 7]
    spread[0][:, places], spread[1][:, places] = reward, value
    holes = algos.gae(*spread, np.isin(np.arange(9), places)[None], gamma=0.9, lam=0.7).advantage_BT
    np.testing.assert_allclose(np.asarray(holes)[:, places], whole, rtol=1e-6)


@pytest.mark.parametrize("seed", _SEEDS)
def test_discounted_returns_equal_a_loop(seed):
    mask, reward = batch(seed, "reward")
    wanted = np.zeros(mask.shape)
    for row in range(_ROWS):
        later = 0.0
        for t in reversed(chosen(mask[row])):
            later = wanted[row, t] = reward[row, t] + 0.9 * later
    np.testing.assert_allclose(algos.discounted_returns(reward, mask, gamma=0.9), wanted, **_CLOSE)


def group_batch(seed):
    """Interleaved groups of 4, 3, 2, 1 and an unscorable one; ids that differ only above 32 bits."""
    rng = np.random.default_rng(seed)
    label = rng.permutation([0, 0, 0, 0, 1, 1, 1, 2, 2, 3, 4, 4])
    group = (label.astype(np.int64) << 32) + 7
    scorable = (rng.random(12) < 0.8) & (label != 4)
    score = np.where(scorable, rng.normal(size=12), math.nan).astype(np.float32)
    return score, scorable, group


def group_oracle(score, scorable, group, formula):
    wanted = np.zeros(len(score))
    for i in np.flatnonzero(scorable):
        members = [float(score[j]) for j in np.flatnonzero(scorable & (group == group[i]))]
        wanted[i] = formula(float(score[i]), members) if len(members) > 1 else 0.0
    return wanted


def grpo(score, scorable, group):
    return algos.group_relative(score, scorable, group, normalize_std=True)


def dr_grpo(score, scorable, group):
    return algos.group_relative(score, scorable, group, normalize_std=False)


_FORMULAS = {
    grpo: lambda s, g: (s - statistics.fmean(g)) / (statistics.stdev(g) + 1e-6),
    dr_grpo: lambda s, g: s - statistics.fmean(g),
    algos.rloo: lambda s, g: s - (math.fsum(g) - s) / (len(g) - 1),
}


@pytest.mark.parametrize("estimate", _FORMULAS, ids=lambda estimate: estimate.__name__)
def test_group_advantages_equal_a_loop_over_ids(estimate):
    compiled = jax.jit(estimate)
    for seed in range(4):
        score, scorable, group = group_batch(seed)
        wanted = group_oracle(score, scorable, group, _FORMULAS[estimate])
        np.testing.assert_allclose(estimate(score, scorable, group), wanted, rtol=1e-4, atol=2e-6)
        # Inside jit the ids are JAX arrays of 32 bits.
        small = (group >> 32).astype(np.int32) * 1000 - 7
        np.testing.assert_allclose(compiled(score, scorable, small), wanted, rtol=1e-4, atol=2e-6)


def test_equal_scores_and_groups_of_one_give_exactly_zero():
    group = np.repeat([1, 2, 3, 4, 5], [1, 3, 7, 6, 1])
    score = np.repeat(np.float32([0.3, 0.1, 0.7, -1e6 / 3, 0.0]), [1, 3, 7, 6, 1])
    arrays = score, np.ones(len(score), bool), group
    for estimate in _FORMULAS:
        np.testing.assert_array_equal(estimate(*arrays), 0)


def test_advantages_do_not_depend_on_the_order_of_rows():
    score, scorable, group = group_batch(3)
    order = np.random.default_rng(0).permutation(len(score))
    straight = algos.group_relative(score, scorable, group, normalize_std=True)
    shuffled = algos.group_relative(score[order], scorable[order], group[order], normalize_std=True)
    np.testing.assert_allclose(np.asarray(straight)[order], shuffled, rtol=1e-5)


def test_an_unscorable_response_leaves_its_siblings_advantages_as_if_it_were_absent():
    score, scorable = np.float32([1, 0, 0, 1, 0]), np.asarray([True, True, False, True, False])
    group = np.asarray([5, 5, 5, 9, 9])
    advantage = np.asarray(algos.group_relative(score, scorable, group, normalize_std=True))
    alone = algos.group_relative(score[:2], scorable[:2], group[:2], normalize_std=True)
    np.testing.assert_allclose(advantage[:2], alone, rtol=1e-6)
    np.testing.assert_array_equal(advantage[2:], 0)


@pytest.mark.parametrize("seed", _SEEDS)
def test_token_rewards_equal_a_loop(seed):
    mask, kl = batch(seed, "kl")
    score = np.random.default_rng(seed).normal(size=_ROWS).astype(np.float32)
    for penalty in (kl, None):
        wanted = np.zeros(mask.shape)
        for row in range(_ROWS):
            places = chosen(mask[row])
            for t in places:
                wanted[row, t] = (score[row] if t == places[-1] else 0.0) - (0.3 * kl[row, t] if penalty is kl else 0)
        got = algos.token_rewards(score, penalty, mask, kl_coefficient=0.3)
        np.testing.assert_allclose(got, wanted, **_CLOSE)


def test_overlong_penalty_equals_a_loop_and_refuses_an_empty_buffer():
    length = np.arange(0, 40, dtype=np.int32)
    wanted = [0.0 if n <= 24 else -0.5 * (n - 24) / 8 if n <= 32 else -0.5 for n in range(40)]
    got = algos.overlong_penalty(length, max_tokens=32, buffer_tokens=8, factor=0.5)
    np.testing.assert_allclose(got, wanted, **_CLOSE)
    for buffer_tokens in (0, 33):
        with pytest.raises(ValueError, match=f"buffer_tokens={buffer_tokens}"):
            algos.overlong_penalty(length, max_tokens=32, buffer_tokens=buffer_tokens, factor=0.5)


def test_k3_is_precise_near_zero_and_bounded_far_away():
    difference = np.float32([1e-3, -1e-3, 3e-4, 0.0, 0.5, -15.0, -900.0, 15.0, 900.0])
    got = np.asarray(algos.kl_estimate(difference, np.zeros_like(difference), estimator="k3"))
    exact = [min(math.expm1(-max(d, -20.0)) + max(d, -20.0), 10.0) if d < 10 else 10.0 for d in difference.tolist()]
    np.testing.assert_allclose(got, exact, rtol=2e-3, atol=1e-12)
    for estimator, wanted in {"k1": difference, "abs": abs(difference), "k2": difference**2 / 2}.items():
        zero = np.zeros_like(difference)
        np.testing.assert_allclose(algos.kl_estimate(difference, zero, estimator=estimator), wanted, rtol=1e-6)


@pytest.mark.parametrize("seed", _SEEDS)
def test_sampler_gap_equals_a_loop(seed):
    mask, old, sampler = batch(seed, "old", "sampler", poison=-math.inf)
    gap = [float(a) - float(b) for a, b in zip(old[mask], sampler[mask], strict=True)]
    ratio = [math.exp(d) for d in gap]
    mean = statistics.fmean
    wanted = {
        "logp_gap_mean": mean(map(abs, gap)),
        "logp_gap_max": max(map(abs, gap)),
        "probability_error": mean(math.exp(abs(d)) for d in gap),
        "kl": mean(min(math.exp(d) - 1 - d, 10.0) for d in gap),
        "kl_reverse": mean(min(math.exp(-d) - 1 + d, 10.0) for d in gap),
        "effective_fraction": 1 / mean((r / mean(ratio)) ** 2 for r in ratio),
    }
    got = algos.sampler_gap(old, sampler, mask)
    assert got.keys() == {f"sampler/{name}" for name in wanted}
    for name, value in wanted.items():
        np.testing.assert_allclose(got[f"sampler/{name}"], value, rtol=1e-4, err_msg=name)


def test_sampler_gap_of_identical_and_of_absent_tokens():
    mask, old = batch(0, "old")
    of_one = {"sampler/probability_error", "sampler/effective_fraction"}
    for name, value in algos.sampler_gap(old, old, mask).items():
        assert value == (name in of_one), name
    assert not any(algos.sampler_gap(old, old, np.zeros_like(mask)).values())


def test_statistics_of_a_sharded_batch_are_those_of_the_whole():
    mask, reward, value = batch(0, "reward", "value")
    rows = NamedSharding(Mesh(np.asarray(jax.devices()), ("data",)), P("data"))

    def whitened(reward, value, mask):
        return algos.whiten(algos.gae(reward, value, mask, gamma=0.99, lam=0.95).advantage_BT, mask)

    sharded = jax.jit(whitened)(*(jax.device_put(x, rows) for x in (reward, value, mask)))
    np.testing.assert_allclose(sharded, whitened(reward, value, mask), **_CLOSE)
