"""Statistics over the tokens a mask selects.

Every function selects before it reduces: values outside the mask may be infinite or NaN and reach neither the result
nor the gradient. Sharded arrays give the statistics of the whole.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int, Num

from jaxrlhf.batch import Array


def selected(value: Num[Array, "*shape"], mask: Bool[Array, "*shape"]) -> Num[Array, "*shape"]:
    """The values inside the mask, 0 elsewhere; the gradient outside is 0 too."""
    return jnp.where(mask, value, 0)


def masked_sum(
    value: Float[Array, "*shape"], mask: Bool[Array, "*shape"], *, axis: int | None = None
) -> Float[Array, "..."]:
    """Sum over the mask, of everything or along one axis."""
    return selected(value, mask).sum(axis)


def masked_mean(
    value: Float[Array, "*shape"], mask: Bool[Array, "*shape"], *, axis: int | None = None
) -> Float[Array, "..."]:
    """Mean over the mask, of everything or along one axis; 0 where the mask is empty."""
    return masked_sum(value, mask, axis=axis) / jnp.maximum(mask.sum(axis), 1)


def segment_sum(value_RW: Float[Array, "R W"], segment_RW: Int[Array, "R W"]) -> Float[Array, "R W"]:
    """Sum over each token's sequence in packed rows: the tokens of its row with the same id; 0 where the id is 0.

    Args:
      segment_RW: Ids from 1 to W, in any order; 0 is what lies outside the mask.
    """
    size = segment_RW.shape[1] + 1

    def of_row(value_W: Array, segment_W: Array) -> Array:
        return jax.ops.segment_sum(value_W, segment_W, num_segments=size)[segment_W]

    inside_RW = segment_RW > 0
    return selected(jax.vmap(of_row)(selected(value_RW, inside_RW), segment_RW), inside_RW)


def span_sums(
    value_BT: Float[np.ndarray, "B T"], span_BT: Int[np.ndarray, "B T"], mask_BT: Bool[np.ndarray, "B T"]
) -> Float[np.ndarray, "B T"]:
    """Sum over the tokens of each token's row with the same span, at each of them; 0 outside the mask. On the host.

    Args:
      span_BT: From 0 to T - 1 inside the mask.
    """
    rows, width = mask_BT.shape
    place_BT = np.where(mask_BT, span_BT, 0) + width * np.arange(rows)[:, None]
    inside_BT = np.where(mask_BT, value_BT, 0)
    total = np.bincount(place_BT.ravel(), weights=inside_BT.ravel(), minlength=rows * width)
    return np.where(mask_BT, total[place_BT], 0).astype(value_BT.dtype)


def segment_mean(value_RW: Float[Array, "R W"], segment_RW: Int[Array, "R W"]) -> Float[Array, "R W"]:
    """Mean over each token's sequence in packed rows; see `segment_sum`."""
    return segment_sum(value_RW, segment_RW) / jnp.maximum(segment_sum(jnp.ones_like(value_RW), segment_RW), 1)


def masked_var(value: Float[Array, "*shape"], mask: Bool[Array, "*shape"]) -> Float[Array, ""]:
    """Unbiased (n - 1) variance over the mask; 0 for fewer than two tokens."""
    value = selected(value, mask)
    deviation = selected(value - masked_mean(value, mask), mask)
    return jnp.square(deviation).sum() / jnp.maximum(mask.sum() - 1, 1)


@jax.jit
def whiten(value: Float[Array, "*shape"], mask: Bool[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Scale to unit variance and shift to zero mean over the mask; 0 outside.

        (x - mean) / sqrt(var + 1e-8)

    Args:
      value: All tokens of the batch: statistics of a part would scale its parts differently.

    Source: Huang et al. 2024 (arXiv:2403.17031), details on reward and advantage whitening.
    """
    value = selected(value, mask)
    return selected((value - masked_mean(value, mask)) / jnp.sqrt(masked_var(value, mask) + 1e-8), mask)
