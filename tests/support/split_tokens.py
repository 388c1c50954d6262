"""Rows whose tokens are split over devices: their gradients, and the program that computes them."""

import functools
import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxrlhf import models
from jaxrlhf.models.moe.experts import RouterInputs
from jaxrlhf.sharding.described import described
from jaxrlhf.sharding.mesh import BATCH_AXES, EXPERT_AXES, TENSOR_AXES, TOKEN_AXES, WEIGHT_AXES, mesh_of
from jaxrlhf.sharding.rules import TRAIN, shardings


def packed(rows=8, width=64):
    """Rows of one to seven sequences, whose borders lie anywhere, every other one with padding at its end."""
    rng = np.random.default_rng(2)
    token_RW = rng.integers(0, 96, (rows, width), dtype=np.int32)
    position_RW, segment_RW = np.zeros((2, rows, width), np.int32)
    for row in range(rows):
        filled = width - (3 * width // 8 if row % 2 else 0)  # more than a slice of four
        cuts = np.sort(rng.choice(np.arange(1, filled), row % 7, replace=False))
        segment_RW[row, :filled] = 1 + np.searchsorted(cuts, np.arange(filled), side="right")
        starts = np.array([0, *cuts])[segment_RW[row, :filled] - 1]
        position_RW[row, :filled] = np.arange(filled) - starts
    return token_RW, position_RW, segment_RW


def mesh_with(sizes):
    return mesh_of(sizes, jax.devices()[: math.prod(sizes.values())])


def execution_on(mesh, config):
    execution = models.choose_execution(
        config,
        jnp.float32,
        mesh,
        row_axes=BATCH_AXES,
        head_axes=TENSOR_AXES,
        expert_axes=EXPERT_AXES,
        weight_axes=WEIGHT_AXES,
        token_axes=TOKEN_AXES,
        remat=True,
    )
    return replace(execution, mesh=mesh, row_axes=BATCH_AXES)


def program(config, execution, layout=None):
    """Loss, log-probabilities, entropies and gradients of packed rows, with the gradients in a layout."""

    def loss(params, rows):
        router = {} if config.experts is None else {"router": RouterInputs(rows[2])}
        hidden_RWD, routed = models.hidden_states(params, config, *rows, execution=execution, **router)
        output = models.token_logp(
            params, config, hidden_RWD, rows[0], temperature=0.9, entropy=True, chunk_tokens=64, execution=execution
        )
        weight_RW = jnp.sin(jnp.arange(rows[0].size)).reshape(rows[0].shape)
        total = (jnp.where(rows[2] > 0, output.logp + 0.1 * output.entropy, 0.0) * weight_RW).sum()
        return total + (0.0 if routed is None else 0.1 * (weight_RW[None] * routed.loss_RW).sum()), output

    return jax.jit(jax.value_and_grad(loss, has_aux=True), out_shardings=(None, layout))


@functools.cache
def compiled(config, sizes, *, rows, width):
    """The program over a mesh, for rows of shapes alone."""
    mesh = mesh_with(dict(sizes))
    layout = shardings(mesh, models.param_dims(config, "lm"), TRAIN)
    params = described(models.param_shapes(config, "lm"), layout)
    by_row = NamedSharding(mesh, PartitionSpec(BATCH_AXES))
    ints = jax.ShapeDtypeStruct((rows, width), np.int32, sharding=by_row)
    return program(config, execution_on(mesh, config), layout).lower(params, (ints, ints, ints)).compile()
