"""Products of few tokens with wide weights, which are the left factor on CPU, are the same products."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrlhf.models import linear
from jaxrlhf.models.kernels import cpu

WIDE, LARGE = 512, 1024
"""Inputs from which on a weight is transposed, and outputs with which it has enough of both."""


def draw(*shape):
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize(
    ("inputs", "outputs", "transposed"),
    [
        ((WIDE,), (LARGE,), True),
        ((64, WIDE // 64), (LARGE,), True),
        ((WIDE,), (2, 4, LARGE // 8), True),
        ((WIDE,), (LARGE - 1,), False),
        ((WIDE - 1,), (2 * LARGE,), False),
    ],
)
def test_a_transposed_weight_gives_the_product_of_the_weight(inputs, outputs, transposed):
    weight, tokens = draw(*inputs, *outputs), draw(3, 1, *inputs)
    prepared = linear.few_rows_layout(jnp.asarray(weight), dims=len(inputs))
    assert isinstance(prepared, cpu.Transposed) is transposed
    found = linear.project(jnp.asarray(tokens), prepared, dims=len(inputs))
    axes = list(range(2, 2 + len(inputs))), list(range(len(inputs)))
    np.testing.assert_allclose(found, np.tensordot(tokens, weight, axes), rtol=0, atol=2e-4)


def test_an_adapter_stays_beside_a_transposed_weight():
    weight, down, up, tokens = draw(WIDE, LARGE), draw(WIDE, 2), draw(2, LARGE), draw(5, WIDE)
    adapted = linear.Adapted(jnp.asarray(weight), linear.Adapter(jnp.asarray(down), jnp.asarray(up), 0.5))
    prepared = linear.few_rows_layout(adapted)
    assert isinstance(prepared.weight, cpu.Transposed)
    found = linear.project(jnp.asarray(tokens), prepared)
    np.testing.assert_allclose(found, tokens @ (weight + 0.5 * down @ up), rtol=0, atol=5e-4)


def test_the_weight_is_read_as_the_left_factor():
    """XLA merges a product's transposes into it, and would be back at the slow one."""
    weight_FD, tokens_TD = jnp.zeros((LARGE, WIDE)), jnp.zeros((8, WIDE))
    text = jax.jit(linear.few_rows_product).lower(tokens_TD, weight_FD).compile().as_text()
    [product] = [line for line in text.splitlines() if " dot(" in line]
    assert f"f32[{LARGE},8]" in product


@pytest.mark.parametrize("backend", ["cpu", "gpu"])
def test_a_product_and_its_gradients_are_those_of_numpy_on_every_backend(backend, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    weight, tokens, change = draw(4, 2, 3), draw(5, 4), draw(5, 2, 3)
    found, pull = jax.vjp(linear.project, jnp.asarray(tokens), jnp.asarray(weight))
    by_tokens, by_weight = pull(jnp.asarray(change))
    np.testing.assert_allclose(found, np.tensordot(tokens, weight, 1), atol=1e-5)
    np.testing.assert_allclose(by_tokens, np.tensordot(change, weight, ([1, 2], [1, 2])), atol=1e-5)
    np.testing.assert_allclose(by_weight, np.tensordot(tokens, change, ([0], [0])), atol=1e-5)
    np.testing.assert_allclose(linear.transposed_product(tokens, tokens, jnp.float32), tokens.T @ tokens, atol=1e-5)
    prepared = linear.few_rows_layout(jnp.asarray(weight))
    np.testing.assert_allclose(linear.project(jnp.asarray(tokens), prepared), found, atol=1e-5)
