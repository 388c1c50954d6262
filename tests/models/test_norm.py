"""The norm and its gradients, beside differences of its formula in float64."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrlhf.models.norm import norm
from tests.models.test_families import GEMMA

EPS = 1e-2
DRAW = np.random.default_rng(0)
INPUT, SCALE, CHANGE = DRAW.standard_normal((2, 3, 6)) * 0.3, DRAW.standard_normal(6), DRAW.standard_normal((2, 3, 6))
INPUT[0, 0] = 0.0  # nothing but eps to divide by


def formula(input_D, scale_D):
    return input_D / np.sqrt(np.mean(input_D**2, axis=-1, keepdims=True) + EPS) * scale_D


def differences(function, array, step=1e-6):
    """Return the differences of `sum(change * function)` by every entry of the array."""
    slope = np.zeros_like(array)
    for place in np.ndindex(array.shape):
        moved = np.zeros_like(array)
        moved[place] = step
        slope[place] = (CHANGE * (function(array + moved) - function(array - moved))).sum() / (2 * step)
    return slope


@pytest.mark.parametrize("backend", ["cpu", "gpu"])
@pytest.mark.parametrize(("dtype", "close"), [(jnp.float32, 2e-6), (jnp.bfloat16, 1e-2)])
def test_the_norm_and_its_gradients_are_those_of_the_formula(dtype, close, backend, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: backend)  # the reference, or the variant of CPUs
    config = replace(GEMMA, rms_norm_eps=EPS)
    input_D, scale_D = jnp.asarray(INPUT, dtype), jnp.asarray(SCALE, jnp.float32)
    found, pull = jax.vjp(lambda *given: norm(config, *given), input_D, scale_D)
    by_input, by_scale = pull(jnp.asarray(CHANGE, dtype))
    assert (found.dtype, by_input.dtype, by_scale.dtype) == (dtype, dtype, jnp.float32)
    given, scale = np.asarray(input_D, np.float64), SCALE + 1
    for ours, expected in [
        (found, formula(given, scale)),
        (by_input, differences(lambda x: formula(x, scale), given)),
        (by_scale, differences(lambda x: formula(given, x), scale)),
    ]:
        np.testing.assert_allclose(np.asarray(ours, np.float64), expected, atol=close * np.abs(expected).max())
