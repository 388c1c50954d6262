"""The norm of every layer."""

import jax
import jax.numpy as jnp
from jaxtyping import Float

from jaxrlhf.architecture import ModelConfig
from jaxrlhf.batch import Array


def norm(
    config: ModelConfig, input_D: Float[Array, "*batch D"], weight_D: Float[Array, "D"], *, eps: float | None = None
) -> Float[Array, "*batch D"]:
    """x / sqrt(mean(x^2) + eps) * scale over the last dimension, in float32.

    Args:
      eps: None is the model's.

    Source: Zhang and Sennrich 2019 (arXiv:1910.07467), eq. 4.
    """
    wide_D = input_D.astype(jnp.float32)
    square_1 = jnp.mean(jnp.square(wide_D), axis=-1, keepdims=True)
    inverse_1 = jax.lax.rsqrt(square_1 + (config.rms_norm_eps if eps is None else eps))
    scale_D = weight_D.astype(jnp.float32) + 1.0 if config.unit_offset else weight_D.astype(jnp.float32)
    scale_D = jnp.expand_dims(scale_D, tuple(range(input_D.ndim - 1)))
    return (wide_D * inverse_1 * scale_D).astype(input_D.dtype)
