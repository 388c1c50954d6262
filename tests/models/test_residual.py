"""Parts beside attention: inputs of zeros, as embeddings of padding may be, have finite gradients."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from tiny_models import DECODER

from jaxrlhf.models.config import LayerInputs, Streams
from jaxrlhf.models.mlp import gated
from jaxrlhf.models.residual.streams import make_streams, merge_streams

GEMMA3N = replace(DECODER, norms="sandwich", layer_inputs=LayerInputs(4, 96), streams=Streams(3))
WIDTH = GEMMA3N.hidden_size


def test_streams():
    matrix = np.random.default_rng(0).normal(size=(2, WIDTH, WIDTH)).astype(np.float32)

    def total(matrix, embed_RWD):
        params = {"streams": {"spread": matrix, "gather": matrix}}
        return merge_streams(params, GEMMA3N, jnp.sin(make_streams(params, GEMMA3N, embed_RWD))).sum()

    embed_RWD = jnp.zeros((1, 2, WIDTH)).at[0, 0].set(1.0)
    gradients = jax.jit(jax.grad(total, argnums=(0, 1)))(matrix, embed_RWD)
    assert all(np.isfinite(each).all() for each in gradients) and np.abs(gradients[0]).max() > 0


def test_the_largest_gates():
    draw = np.random.default_rng(0).normal
    mlp = {name: draw(size=(WIDTH, WIDTH)).astype(np.float32) for name in ("gate", "up", "down")}

    def total(mlp, input_RWD):
        return gated(mlp, GEMMA3N, input_RWD, cut=jnp.float32(0.5)).sum()

    input_RWD = jnp.zeros((1, 2, WIDTH)).at[0, 0].set(jnp.arange(WIDTH) / WIDTH)
    gradients = jax.tree.leaves(jax.jit(jax.grad(total, argnums=(0, 1)))(mlp, input_RWD))
    assert all(np.isfinite(each).all() for each in gradients) and np.abs(gradients[0]).max() > 0
