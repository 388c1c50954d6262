"""The smallest decoder, weights that all show, and the logits they make."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxrlhf import models
from jaxrlhf.models.config import ModelConfig

DECODER = ModelConfig(
    family="qwen2",
    vocab_size=96,
    hidden_size=32,
    intermediate_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
)
"""What tests need beside this they replace."""

SMALL = ModelConfig(
    family="qwen3",
    vocab_size=32,
    hidden_size=16,
    intermediate_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
)
"""A smaller one, for engines."""


def drawn(config):
    """Weights large enough that every part shows, norms and biases included."""
    rng = np.random.default_rng(0)

    def draw(param):
        return jnp.asarray((param.init == "ones") + 0.1 * rng.standard_normal(param.shape), jnp.float32)

    return jax.tree.map(draw, models.declare(config, "lm"))


@functools.cache
def gaussian(config):
    """Every entry from one normal distribution, norms, biases and sinks too; drawn on the host, once."""
    rng = np.random.default_rng(3)
    shapes = models.param_shapes(config, "lm")
    return jax.tree.map(lambda leaf: np.float32(0.3 * rng.standard_normal(leaf.shape)), shapes)


def sharp(config, seed=3, deviation=0.2):
    """Weights of this standard deviation, so that distributions are far from uniform; norms 1 and biases 0 stay.

    Drawn on the host: random numbers of each shape would be a program.
    """
    rng = np.random.default_rng(seed)
    parts = {"normal": deviation, "ones": 0.0, "zeros": 0.0}

    def draw(param):
        noise = parts[param.init] * rng.standard_normal(param.shape)
        return np.float32((param.init == "ones") + noise)

    return jax.tree.map(draw, models.declare(config, "lm"))


@functools.partial(jax.jit, static_argnums=1)
def logits(params, config, token_RW):
    """Of rows that hold one sequence each."""
    position_RW = jnp.broadcast_to(jnp.arange(token_RW.shape[1]), token_RW.shape)
    hidden_RWD = models.hidden_states(params, config, token_RW, position_RW, jnp.ones_like(token_RW)).hidden_RWD
    return models.logits(params, config, hidden_RWD)


def close(ours, theirs, tolerance=1e-5):
    """Each array agrees to a fraction of its own largest entry."""

    def one(a, b):
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * np.abs(b).max())

    jax.tree.map(one, ours, theirs)
