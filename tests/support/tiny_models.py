"""The smallest decoder, weights that all show, and the logits they make."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxrlhf import models
from jaxrlhf.models.config import ModelConfig
from jaxrlhf.models.linear import Adapted
from jaxrlhf.models.lora.lora import change_of

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
"""Small decoder; tests replace the fields that they need otherwise."""

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


def random_params(config):
    """Weights large enough that every part shows, norms and biases included."""
    rng = np.random.default_rng(0)

    def draw(param):
        return jnp.asarray((param.init == "ones") + 0.1 * rng.standard_normal(param.shape), jnp.float32)

    return jax.tree.map(draw, models.declare(config, "lm"))


@functools.cache
def gaussian(config):
    """Every entry from one normal distribution, norms, biases and sinks too; sampled on the host, once."""
    rng = np.random.default_rng(3)
    shapes = models.param_shapes(config, "lm")
    return jax.tree.map(lambda leaf: np.float32(0.3 * rng.standard_normal(leaf.shape)), shapes)


def sharp(config, seed=3, deviation=0.2):
    """Weights of this standard deviation, so that distributions are far from uniform; norms 1 and biases 0 stay.

    Sampled on the host: random numbers of each shape would be a program.
    """
    rng = np.random.default_rng(seed)
    parts = {"normal": deviation, "ones": 0.0, "zeros": 0.0}

    def draw(param):
        noise = parts[param.init] * rng.standard_normal(param.shape)
        return np.float32((param.init == "ones") + noise)

    return jax.tree.map(draw, models.declare(config, "lm"))


@functools.partial(jax.jit, static_argnums=1)
def logits(params, config, token_RW):
    """Return the logits of rows that hold one sequence each."""
    position_RW = jnp.broadcast_to(jnp.arange(token_RW.shape[1]), token_RW.shape)
    hidden_RWD = models.hidden_states(params, config, token_RW, position_RW, jnp.ones_like(token_RW)).hidden_RWD
    return models.logits(params, config, hidden_RWD)


def decoded(params, config, token_PS, *, first):
    """Logits of each row after its `first` tokens, which are prefilled, and after each that is decoded behind them."""
    prompts, width = token_PS.shape

    @jax.jit
    def start(params):
        hidden_PD, prefix, _ = models.prefill(params, config, token_PS[:, :first], np.full(prompts, first, np.int32))
        cache = models.empty_cache(config, slots=prompts, capacity=width)
        cache = models.insert_prefix(cache, prefix, jnp.arange(prompts), jnp.arange(prompts))
        return models.logits(params, config, hidden_PD), cache

    @jax.jit
    def step(params, token_B, position_B, cache):
        layers = models.unstack_layers(params, config)
        hidden_BD, cache, _ = models.decode(layers, params, config, token_B, position_B, cache)
        return models.logits(params, config, hidden_BD), cache

    logit_PV, cache = start(params)
    found = [logit_PV]
    for position in range(first, width):
        logit_PV, cache = step(params, token_PS[:, position], np.full(prompts, position, np.int32), cache)
        found.append(logit_PV)
    return np.stack(found, axis=1)


def merged(params):
    """Parameters with adapters added to their weights."""

    def one(node):
        return node.weight + change_of(node.adapter) if isinstance(node, Adapted) else node

    return jax.tree.map(one, params, is_leaf=lambda node: isinstance(node, Adapted))


def close(ours, theirs, tolerance=1e-5):
    """Each array agrees to a fraction of its own largest entry."""

    def one(a, b):
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * np.abs(b).max())

    jax.tree.map(one, ours, theirs)


def same_responses(ours, theirs, *, atol=1e-5):
    """Completions of the same requests, sampled alike."""
    for one, other in zip(ours, theirs, strict=True):
        assert (one.request_id, one.tokens, one.truncated) == (other.request_id, other.tokens, other.truncated)
        np.testing.assert_allclose(one.logps, other.logps, atol=atol)
