"""Tokens of a row split over a mesh axis: what a context axis needs is one field of the execution."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from tiny_models import DECODER, drawn

from jaxrlhf import models
from jaxrlhf.sharding.mesh import BATCH_AXES, TENSOR_AXES, mesh_of
from jaxrlhf.sharding.rules import TRAIN, shardings

ROWS, WIDTH = 4, 16


def packed():
    """Rows with sequences of their own lengths, one of which lies on both sides of the middle, and padding."""
    token_RW = np.random.default_rng(2).integers(0, 96, (ROWS, WIDTH), dtype=np.int32)
    index_RW, cut_R1 = np.arange(WIDTH)[None], np.array([[3], [6], [9], [11]])
    position_RW = np.where(index_RW < cut_R1, index_RW, index_RW - cut_R1).astype(np.int32)
    segment_RW = np.where(index_RW < cut_R1, 1, 2 * (index_RW < WIDTH - 2)).astype(np.int32)
    return token_RW, position_RW, segment_RW


def gradient(execution):
    def loss(params, rows):
        hidden_RWD = models.hidden_states(params, DECODER, *rows, execution=execution).hidden_RWD
        logp_RW = models.token_logp(params, DECODER, hidden_RWD, rows[0]).logp
        weight_RW = jnp.sin(jnp.arange(logp_RW.size)).reshape(logp_RW.shape)
        return (jnp.where(rows[2] > 0, logp_RW, 0.0) * weight_RW).sum(), hidden_RWD

    return jax.jit(jax.grad(loss, has_aux=True))


@pytest.mark.parametrize("sizes", [{"context": 2}, {"data": 2, "context": 2, "tensor": 2}], ids=str)
def test_two_halves_of_every_row_give_what_whole_rows_give(sizes):
    params, rows = drawn(DECODER), packed()
    mesh = mesh_of(sizes, jax.devices()[: int(np.prod(list(sizes.values())))])
    split = NamedSharding(mesh, PartitionSpec(BATCH_AXES, "context"))
    execution = models.Execution(
        remat=True, mesh=mesh, row_axes=BATCH_AXES, token_axes=("context",), head_axes=TENSOR_AXES
    )
    layout = shardings(mesh, models.param_dims(DECODER, "lm"), TRAIN)
    found = gradient(execution)(jax.device_put(params, layout), jax.device_put(rows, split))
    expected = gradient(models.ONE_DEVICE)(params, rows)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=4e-6 * np.abs(b).max()), found, expected)
    hidden_RWD = found[1]
    assert hidden_RWD.addressable_shards[0].data.shape[1] == WIDTH // 2, "no device has the residual of whole rows"
