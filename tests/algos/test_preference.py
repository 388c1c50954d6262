"""Losses of pairs against recorded values and the loss as it is written, and the objective that sums over answers."""

import json
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrlhf import algos
from jaxrlhf.algos import PairRewards, PairSettings
from jaxrlhf.algos.objectives import TokenOutput

_INPUTS = json.loads((Path(__file__).parents[1] / "golden" / "vectors.json").read_text())["inputs"]
_RECORDED = {
    "dpo": 0.6941014805582552,
    "smoothed": 0.6944589005102156,
    "ipo": 26.83857783687434,
}
"""Losses of rows 0, 1, 2 of the recorded inputs against rows 3, 4, 5, with beta 0.1, by OpenRLHF's loss classes."""
CHOSEN, REJECTED = np.float64([0.3, -2.0, 5.0, 0.0]), np.float64([0.1, 1.0, -4.0, 0.0])
MARGIN = np.float64([0.0, 0.5, 2.0, 1.0])
SAFE, UNSAFE = np.array([True, False, True, True]), np.array([False, False, True, False])


def sigmoid(x):
    return 1 / (1 + jnp.exp(-x))


TOKENS = np.array([[2, 3], [4, 1], [5, 5], [1, 7]])

TRL = json.loads((Path(__file__).parents[1] / "golden" / "zoo.json").read_text())
"""Losses of TRL's trainers, beside what their source says."""


def log_odds(mean):
    return jnp.log(jnp.exp(mean) / (1 - jnp.exp(mean)))


PAIRS = {
    "dpo": (
        lambda c, r: algos.dpo(c, r, beta=0.3),
        lambda c, r: -jnp.log(sigmoid(0.3 * (c - r))),
    ),
    "smoothed": (
        lambda c, r: algos.dpo(c, r, beta=0.3, label_smoothing=0.2),
        lambda c, r: -0.8 * jnp.log(sigmoid(0.3 * (c - r))) - 0.2 * jnp.log(sigmoid(0.3 * (r - c))),
    ),
    "ipo": (lambda c, r: algos.ipo(c, r, beta=0.3), lambda c, r: (c - r - 1 / 0.6) ** 2),
    "bradley-terry": (
        lambda c, r: algos.bradley_terry(c, r, MARGIN),
        lambda c, r: -jnp.log(sigmoid(c - r - MARGIN)),
    ),
    "cost": (
        lambda c, r: algos.pair_cost(c, r, SAFE, UNSAFE),
        lambda c, r: (
            -jnp.log(sigmoid(r - c))
            - jnp.log(sigmoid(jnp.array([-1, 1, -1, -1]) * c))
            - jnp.log(sigmoid(jnp.array([1, 1, -1, 1]) * r))
        ),
    ),
    "kto": (
        lambda c, r: algos.kto(c, r, 0.4, beta=0.3, weights=(1.5, 0.5)),
        lambda c, r: 0.75 * (1 - sigmoid(0.3 * (c - 0.4))) + 0.25 * (1 - sigmoid(0.3 * (0.4 - r))),
    ),
    "simpo": (
        lambda c, r: algos.simpo(c, r, TOKENS, beta=2.0, margin=0.5),
        lambda c, r: -jnp.log(sigmoid(2 * c / TOKENS[:, 0] - 2 * r / TOKENS[:, 1] - 0.5)),
    ),
    "odds": (
        lambda c, r: algos.odds_ratio(c - 9, r - 9, TOKENS, coefficient=0.7),
        lambda c, r: -0.7 * jnp.log(sigmoid(log_odds((c - 9) / TOKENS[:, 0]) - log_odds((r - 9) / TOKENS[:, 1]))),
    ),
    "likelihood": (
        lambda c, r: algos.dpo(c, r, beta=0.3) + 0.5 * algos.nll_per_token(c - 7, np.int32([2, 3, 4, 5])),
        lambda c, r: -jnp.log(sigmoid(0.3 * (c - r))) - 0.5 * (c - 7) / jnp.array([2, 3, 4, 5]),
    ),
}


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def slopes(loss):
    """Derivatives with respect to both answers."""
    return jax.grad(lambda c, r: loss(c, r).sum(), argnums=(0, 1))


@pytest.mark.parametrize("name", PAIRS)
def test_values_and_derivatives_are_those_of_the_loss_as_written(name):
    ours, written = PAIRS[name]
    np.testing.assert_allclose(ours(CHOSEN, REJECTED), written(CHOSEN, REJECTED), rtol=1e-12)
    found, expected = (slopes(loss)(CHOSEN, REJECTED) for loss in (ours, written))
    np.testing.assert_allclose(found, expected, rtol=1e-10)


@pytest.mark.parametrize("name", _RECORDED)
def test_recorded_losses(name):
    logp, ref_logp, mask = (np.asarray(_INPUTS[key], np.float64) for key in ("logp", "ref_logp", "mask"))
    ratio = ((logp - ref_logp) * mask).sum(axis=1)
    loss = {
        "dpo": lambda c, r: algos.dpo(c, r, beta=0.1),
        "smoothed": lambda c, r: algos.dpo(c, r, beta=0.1, label_smoothing=0.1),
        "ipo": lambda c, r: algos.ipo(c, r, beta=0.1),
    }[name](ratio[:3], ratio[3:])
    assert float(loss.mean()) == pytest.approx(_RECORDED[name], rel=1e-12)


@pytest.mark.parametrize("name", PAIRS)
def test_far_apart_answers_have_finite_losses_and_slopes(name):
    far = np.float64([1e4, -1e4, 1e4, -1e4])
    for values in (PAIRS[name][0](far, -far), *slopes(PAIRS[name][0])(far, -far)):
        assert np.isfinite(values).all()


def judge(margin, sums):
    """A loss of both answers' sums, of their numbers of tokens and of a further field."""
    (chosen, rejected), tokens = sums["value"].T, sums["tokens"]
    return PairRewards(sums["offset"][:, 0] + chosen * rejected**2 / tokens[:, 1] - margin, chosen, rejected)


@pytest.mark.parametrize("wrap", [TokenOutput, lambda x: x], ids=["log-probabilities", "scores"])
def test_the_objective_of_pairs_is_the_loss_of_sums_wherever_the_answers_are(wrap):
    # Two of three pairs are in this microbatch: pair 1 in one row, pair 0 in two.
    answer = np.array([[3, 3, 4, 0, 4], [0, 1, 2, 2, 0]])
    mask = answer > 0
    value = np.array([[0.5, -1.0, 2.0, np.nan, 1.0], [np.inf, 3.0, -0.5, -1.5, np.nan]])
    fields = {
        "answer": np.where(mask, answer, 7),
        "offset": np.where(answer == 3, 0.25, np.where(mask, 4.0, np.nan)),
        "metric_weight": np.where(mask, 2.0, np.nan),
    }
    weight = np.where(mask, np.array([[1 / 4], [1 / 3]]), np.nan)  # one over the pair's tokens

    def total(value):
        return algos.pair_objective(wrap(value), mask, weight, fields, PairSettings(judge, 0.125, 3)).loss.sum()

    losses = [4.0 + 3.0 * 4.0 / 2 - 0.125, 0.5 - 0.5 * 9.0 / 2 - 0.125]
    np.testing.assert_allclose(total(value), sum(losses), rtol=1e-12)
    # d/dc = r^2 / tokens, d/dr = 2 c r / tokens
    expected = [[4.5, 4.5, -1.5, 0.0, -1.5], [0.0, 2.0, -6.0, -6.0, 0.0]]
    np.testing.assert_allclose(jax.grad(total)(value), expected, rtol=1e-12)
    metrics = algos.pair_objective(wrap(value), mask, weight, fields, PairSettings(judge, 0.125, 3)).metrics
    np.testing.assert_allclose(metrics["preference/loss"][mask], 2 * np.array([losses[1]] * 4 + [losses[0]] * 3))
    assert (metrics["preference/accuracy"][mask] == 2 * np.array([0.0] * 4 + [1.0] * 3)).all()
    assert not any(value[~mask].any() for value in metrics.values())


def test_the_likelihood_of_an_answer_without_tokens_is_nothing():
    np.testing.assert_allclose(algos.nll_per_token(np.float64([0.0, -4.0]), np.int32([0, 2])), [0.0, 2.0])


@pytest.mark.parametrize("name", ["cpo", "simpo", "orpo"])
def test_losses_without_a_reference_are_those_of_trl(name):
    logp, mask = (np.asarray(_INPUTS[key], np.float64) for key in ("logp", "mask"))
    chosen, rejected = (logp * mask).sum(axis=1).reshape(2, 3)
    tokens = mask.sum(axis=1).reshape(2, 3).T.astype(int)
    loss = {
        "cpo": lambda: algos.dpo(chosen, rejected, beta=0.3, label_smoothing=0.1),
        "simpo": lambda: algos.simpo(chosen, rejected, tokens, beta=2.0, margin=0.5),
        "orpo": lambda: algos.odds_ratio(chosen, rejected, tokens, coefficient=0.7),
    }[name]()
    np.testing.assert_allclose(loss, TRL[f"preference/{name}"], rtol=1e-6)


def test_the_slope_of_dpo_is_the_advantage_of_the_best_and_the_worst():
    score = np.float32([0.2, 0.9, 0.5, 1.0, 1.0, 0.0, 3.0])
    scorable, group = np.array([True] * 6 + [False]), np.array([7, 7, 7, 8, 8, 8, 8])
    ratio = np.arange(7.0)
    found = algos.best_and_worst(score, scorable, group, ratio, beta=0.5)
    [first, second, third] = [0.5 / (1 + math.exp(0.5 * (ratio[b] - ratio[w]))) for b, w in ((1, 0), (3, 5), (4, 5))]
    wanted = [-3 * first, 3 * first, 0, 1.5 * second, 1.5 * third, -1.5 * (second + third), 0]
    np.testing.assert_allclose(found, wanted, rtol=1e-6)
    # Of 2 prompts there are 5 rows then, and the mean over rows is still that over prompts.
    scorable[2] = False
    fewer = algos.best_and_worst(score, scorable, group, ratio, beta=0.5)
    np.testing.assert_allclose(fewer, np.array(wanted) * (2.5 / 3), rtol=1e-6)
    assert not algos.best_and_worst(np.ones(7), scorable, group, ratio, beta=0.5).any()
