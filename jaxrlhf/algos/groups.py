"""Sums over groups: the responses to one prompt, wherever they are in the batch."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int, Num

from jaxrlhf.batch import Array


def dense_ids(id_B: Int[Array, "B"]) -> Int[Array, "B"]:
    """Number the distinct ids from 0, so that they can index segments.

    Ids of 64 bits have to arrive as numpy arrays: JAX would cut them to 32 and merge groups.
    """
    if isinstance(id_B, np.ndarray):
        return np.unique(id_B, return_inverse=True)[1].astype(np.int32)
    return jnp.unique(id_B, return_inverse=True, size=id_B.shape[0])[1]


@jax.jit
def group_sum(value_B: Num[Array, "B"], group_B: Int[Array, "B"]) -> Num[Array, "B"]:
    """The sum over the group of each row; groups numbered by `dense_ids`."""
    return jax.ops.segment_sum(value_B, group_B, num_segments=len(group_B))[group_B]


@jax.jit
def group_min(value_B: Num[Array, "B"], group_B: Int[Array, "B"]) -> Num[Array, "B"]:
    """The least value in the group of each row; groups numbered by `dense_ids`."""
    return jax.ops.segment_min(value_B, group_B, num_segments=len(group_B))[group_B]
