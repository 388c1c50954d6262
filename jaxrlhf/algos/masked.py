"""Masked statistics: sums, means and variances over the tokens that a mask selects.

Every function selects before it reduces: values outside the mask may be infinite or NaN, and reach neither the result
nor the gradient. Statistics of sharded arrays are over the whole array.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int, Num

from jaxrlhf.batch import Array


def selected(value: Num[Array, "*shape"], mask: Bool[Array, "*shape"]) -> Num[Array, "*shape"]:
    """Return the values inside the mask and 0 outside; the gradient outside is 0 too."""
    return jnp.where(mask, value, 0)


def masked_sum(
    value: Float[Array, "*shape"], mask: Bool[Array, "*shape"], *, axis: int | None = None
) -> Float[Array, "..."]:
    """Sum over the mask, of the whole array or along one axis."""
    return selected(value, mask).sum(axis)


def masked_mean(
    value: Float[Array, "*shape"], mask: Bool[Array, "*shape"], *, axis: int | None = None
) -> Float[Array, "..."]:
    """Compute the mean over the mask, of the whole array or along one axis; 0 for an empty mask."""
    return masked_sum(value, mask, axis=axis) / jnp.maximum(mask.sum(axis), 1)


def segment_sum(value_RW: Float[Array, "R W"], segment_RW: Int[Array, "R W"]) -> Float[Array, "R W"]:
    """Sum over each token's sequence in packed rows, that is over the tokens of the row with the same id.

    Args:
      segment_RW: Sequence ids from 1 to W, in any order; 0 outside the mask, where the result is 0.
    """
    size = segment_RW.shape[1] + 1

    def of_row(value_W: Array, segment_W: Array) -> Array:
        return jax.ops.segment_sum(value_W, segment_W, num_segments=size)[segment_W]

    inside_RW = segment_RW > 0
    return selected(jax.vmap(of_row)(selected(value_RW, inside_RW), segment_RW), inside_RW)


def segment_mean(value_RW: Float[Array, "R W"], segment_RW: Int[Array, "R W"]) -> Float[Array, "R W"]:
    """Compute the mean over each token's sequence in packed rows; see `segment_sum`."""
    return segment_sum(value_RW, segment_RW) / jnp.maximum(segment_sum(jnp.ones_like(value_RW), segment_RW), 1)


def masked_var(value: Float[Array, "*shape"], mask: Bool[Array, "*shape"]) -> Float[Array, ""]:
    """Compute the unbiased (n - 1) variance over the mask; 0 for fewer than two tokens."""
    value = selected(value, mask)
    deviation = selected(value - masked_mean(value, mask), mask)
    return jnp.square(deviation).sum() / jnp.maximum(mask.sum() - 1, 1)


@jax.jit
def whiten(value: Float[Array, "*shape"], mask: Bool[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Scale to unit variance and shift to zero mean over the mask; 0 outside.

        (x - mean) / sqrt(var + 1e-8)

    Args:
      value: Values of all tokens of the batch: statistics of parts would scale the parts differently.

    Source: Huang et al. 2024 (arXiv:2403.17031), details on reward and advantage whitening.
    """
    value = selected(value, mask)
    return selected((value - masked_mean(value, mask)) / jnp.sqrt(masked_var(value, mask) + 1e-8), mask)
