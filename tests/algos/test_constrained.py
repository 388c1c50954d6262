"""The multiplier of a constraint, and one advantage out of a reward's and a cost's."""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrlhf.algos import gae, lagrangian_advantage, next_multiplier

_VECTORS = json.loads((Path(__file__).parents[1] / "golden" / "vectors.json").read_text())
_STEP = {"limit": 0.3, "learning_rate": 0.1, "largest": 5.0}


def test_the_multiplier_as_recorded():
    multiplier = 0.7
    for cost, wanted in zip([0.5, 1.5, -0.2], _VECTORS["expected"]["constrained/multiplier"], strict=True):
        multiplier = next_multiplier(multiplier, cost, **_STEP)
        assert multiplier == pytest.approx(wanted, rel=1e-12)


def test_the_advantage_as_recorded():
    inputs = {name: np.asarray(value, np.float32) for name, value in _VECTORS["inputs"].items()}
    mask = inputs["mask"] == 1
    gain = gae(inputs["reward"], inputs["old_value"], mask, gamma=0.99, lam=0.95).advantage_BT
    cost = gae(-inputs["reward"], inputs["old_value"] / 2, mask, gamma=0.99, lam=0.95).advantage_BT
    wanted = np.where(mask, _VECTORS["expected"]["gae/with_cost"], 0)
    np.testing.assert_allclose(lagrangian_advantage(gain, cost, multiplier=0.7), wanted, rtol=2e-5, atol=2e-6)


def test_the_multiplier_rises_above_the_limit_and_falls_below_it_but_never_to_nothing():
    assert next_multiplier(1.0, 0.31, **_STEP) > 1.0 > next_multiplier(1.0, 0.29, **_STEP)
    assert next_multiplier(1.0, 0.3, **_STEP) == pytest.approx(1.0, rel=1e-12)
    assert next_multiplier(4.9, 2.0, **_STEP) == pytest.approx(5.0)
    assert next_multiplier(5.0, 1e6, **_STEP) == pytest.approx(5.0)
    assert 0 < next_multiplier(0.5, -100.0, **_STEP) < 0.01
    # The step is of the logarithm and grows with the price: twice the price, twice the step.
    steps = [np.log(next_multiplier(price, 0.8, **_STEP) / price) for price in (0.5, 1.0)]
    assert steps[1] == pytest.approx(2 * steps[0], rel=1e-9)


def test_a_price_of_nothing_leaves_the_reward_and_a_high_one_the_cost():
    gain, cost = jnp.array([1.0, -2.0]), jnp.array([3.0, 0.5])
    np.testing.assert_array_equal(lagrangian_advantage(gain, cost, multiplier=0.0), gain)
    np.testing.assert_allclose(lagrangian_advantage(gain, cost, multiplier=1e6), -cost, atol=1e-5)
