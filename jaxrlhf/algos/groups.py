"""Group sums and minima; a group is the responses to one prompt, anywhere in the batch."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int, Num

from jaxrlhf.batch import Array


def dense_ids(id_B: Int[Array, "B"]) -> Int[Array, "B"]:
    """Number the distinct ids from 0, so that they can index segments.

    64-bit ids must be numpy arrays: JAX would truncate them to 32 bits and merge groups.
    """
    if isinstance(id_B, np.ndarray):
        return np.unique(id_B, return_inverse=True)[1].astype(np.int32)
    return jnp.unique(id_B, return_inverse=True, size=id_B.shape[0])[1]


@jax.jit
def group_sum(value_B: Num[Array, "B"], group_B: Int[Array, "B"]) -> Num[Array, "B"]:
    """Return the sum over each row's group; groups are numbered by `dense_ids`."""
    return jax.ops.segment_sum(value_B, group_B, num_segments=len(group_B))[group_B]


@jax.jit
def group_min(value_B: Num[Array, "B"], group_B: Int[Array, "B"]) -> Num[Array, "B"]:
    """Return the minimum over each row's group; groups are numbered by `dense_ids`."""
    return jax.ops.segment_min(value_B, group_B, num_segments=len(group_B))[group_B]
