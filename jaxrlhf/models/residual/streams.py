"""Several residual streams (AltUp): each layer computes with the first stream, and predicts and corrects all streams.

    predicted_a = h_a + sum_b coef_ab h_b                        coef = P tanh(router(h_0))
    corrected_a = predicted_a + (1 + c_a) (layer(predicted_0) - predicted_0)    c = C tanh(router(layer(predicted_0)))

The first stream starts as the embedding, the others as projections of it. After the last layer the others are projected
again, and all streams are averaged. Each projection is scaled to the root mean square of the embedding or first stream.
Between layers the streams are concatenated, `[R, W, C]` with C = A D.

Source: Baykal et al. 2023 (AltUp, arXiv:2301.13310), section 3; Gemma 3n, as `altup_num_inputs` in transformers.
"""

import jax.numpy as jnp
from jaxtyping import Float

from jaxrlhf.batch import Array, Params
from jaxrlhf.models import linear
from jaxrlhf.models.config import ModelConfig
from jaxrlhf.models.norm import norm

_SMALLEST = 1e-5
"""Lower bound of a projection's mean square; the projection is divided by the root."""
_NOTHING = 1e-30
"""Mean square that counts as zero."""


def make_streams(params: Params, config: ModelConfig, embed_RWD: Float[Array, "R W D"]) -> Float[Array, "R W C"]:
    """Make the streams of an embedding; the embedding itself if there is only one stream."""
    if config.streams is None:
        return embed_RWD
    others = [_as_large(linear.project(embed_RWD, weight), embed_RWD) for weight in params["streams"]["spread"]]
    return jnp.concatenate([embed_RWD, *others], axis=-1)


def merge_streams(params: Params, config: ModelConfig, hidden_C: Float[Array, "*batch C"]) -> Float[Array, "*batch D"]:
    """Average all streams, after projections; return the hidden states themselves if there is only one stream."""
    if config.streams is None:
        return hidden_C
    first_D, *others = jnp.split(hidden_C, config.streams.count, axis=-1)
    total_D = first_D
    for other_D, weight in zip(others, params["streams"]["gather"], strict=True):
        total_D += _as_large(linear.project(other_D, weight), first_D)
    return total_D / config.streams.count


def _as_large(projected_D: Array, like_D: Array) -> Array:
    """Scale a projection to the root mean square of another array."""

    def mean_square(array_D: Array) -> Array:
        return jnp.mean(jnp.square(array_D.astype(jnp.float32)), axis=-1, keepdims=True)

    # For an embedding of zeros (padding, for example) the root alone would have no finite gradient.
    size = jnp.sqrt(jnp.maximum(mean_square(like_D), _NOTHING))
    size /= jnp.sqrt(jnp.maximum(mean_square(projected_D), _SMALLEST))
    return projected_D * size.astype(projected_D.dtype)


def predicted(layer: Params, config: ModelConfig, hidden_RWC: Float[Array, "R W C"]) -> Float[Array, "R W A D"]:
    """Predict each stream from all streams, before the layer runs."""
    assert config.streams is not None
    count = config.streams.count
    hidden_RWAD = hidden_RWC.reshape(*hidden_RWC.shape[:2], count, -1)
    coefficient_RWC = linear.project(_routed(layer, config, hidden_RWAD[:, :, 0]), layer["streams"]["predict"])
    coefficient_RWAB = coefficient_RWC.reshape(*coefficient_RWC.shape[:2], count, count)
    return hidden_RWAD + jnp.einsum("RWAB,RWBD->RWAD", coefficient_RWAB, hidden_RWAD)


def corrected(
    layer: Params, config: ModelConfig, predicted_RWAD: Float[Array, "R W A D"], output_RWD: Float[Array, "R W D"]
) -> Float[Array, "R W A D"]:
    """Correct the predicted streams by the layer's output for the first stream."""
    coefficient_RWA = linear.project(_routed(layer, config, output_RWD), layer["streams"]["correct"]) + 1
    return predicted_RWAD + coefficient_RWA[..., None] * (output_RWD - predicted_RWAD[:, :, 0])[:, :, None]


def _routed(layer: Params, config: ModelConfig, hidden_RWD: Array) -> Array:
    """Compute tanh of a projection of one stream: a number for each stream."""
    own = layer["streams"]
    normed_RWD = norm(config, hidden_RWD, own["router_norm"]) / config.hidden_size
    return jnp.tanh(linear.project(normed_RWD, own["router"]).astype(jnp.float32)).astype(hidden_RWD.dtype)
