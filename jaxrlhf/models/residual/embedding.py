"""Lookup of token embeddings, also in a table whose rows and width are split over devices."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Float, Int

from jaxrlhf.batch import Array, Params
from jaxrlhf.models.config import ModelConfig
from jaxrlhf.models.execution import Execution
from jaxrlhf.sharding.rules import TRAIN, shardings


def embedded(
    params: Params, config: ModelConfig, token_RW: Int[Array, "R W"], execution: Execution
) -> Float[Array, "R W D"]:
    """Return the embeddings of tokens as the first layer gets them."""
    embed_RWD = looked_up(params["embed"], token_RW, execution)
    if config.embedding_multiplier != 1.0:
        embed_RWD = embed_RWD * config.embedding_multiplier
    if config.scale_embeddings:
        embed_RWD = embed_RWD * jnp.asarray(config.hidden_size**0.5, embed_RWD.dtype)
    return embed_RWD


def looked_up(
    table_VX: Float[Array, "V *X"], token_SY: Int[Array, "S Y"], execution: Execution
) -> Float[Array, "S Y *X"]:
    """Look up the embeddings of tokens, in the dtype of activations.

    If training splits the table by width, each device looks up its part of the width for the tokens of all devices
    that share the table. One all-to-all then gives each device the whole width of its own tokens. Over f devices a
    device receives `(f - 1) / f` of its result, whereas a gather of the table would receive most of the vocabulary.
    Results from parts of the vocabulary are summed.

    Args:
      token_SY: Token ids of rows, or of slices of rows (`Execution.slices`).
    """
    if not execution.width_axes:
        return table_VX[token_SY].astype(execution.dtype)
    assert execution.mesh is not None, "axes require a mesh"
    inner, width = [None] * (table_VX.ndim - 2), table_VX.shape[-1]
    vocab_axes, split_axes = shardings(execution.mesh, ("vocab", ("embed", width)), TRAIN).spec
    width_axes = tuple(axis for axis in execution.width_axes if axis in split_axes)

    def on_device(table_VX: Array, token_SY: Array) -> Array:
        token_FSY = lax.all_gather(token_SY, width_axes)
        row_FSY = token_FSY - lax.axis_index(vocab_axes) * len(table_VX)
        here_FSY = (row_FSY >= 0) & (row_FSY < len(table_VX))
        found_FSYX = table_VX[jnp.where(here_FSY, row_FSY, 0)].astype(execution.dtype)
        found_FSYX *= here_FSY.reshape(*here_FSY.shape, *[1] * (found_FSYX.ndim - 3))
        found_SYX = lax.all_to_all(found_FSYX, width_axes, 0, found_FSYX.ndim - 1, tiled=True)
        return lax.psum(found_SYX[0], vocab_axes)

    table, by_row = PartitionSpec(vocab_axes, *inner, width_axes), PartitionSpec(execution.slice_axes)
    return jax.shard_map(on_device, mesh=execution.mesh, in_specs=(table, by_row), out_specs=by_row)(table_VX, token_SY)
