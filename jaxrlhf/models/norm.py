"""RMS norm of every layer."""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Float

from jaxrlhf.batch import Array
from jaxrlhf.models.config import ModelConfig
from jaxrlhf.models.kernels import cpu


def norm(
    config: ModelConfig, input_D: Float[Array, "*batch D"], weight_D: Float[Array, "D"], *, eps: float | None = None
) -> Float[Array, "*batch D"]:
    """Apply the RMS norm x / sqrt(mean(x^2) + eps) * scale over the last dimension, in float32.

    Args:
      eps: Number added under the root; None is the model's `rms_norm_eps`.

    Source: Zhang and Sennrich 2019 (arXiv:1910.07467), eq. 4.
    """
    scale_D = weight_D.astype(jnp.float32) + 1.0 if config.unit_offset else weight_D.astype(jnp.float32)
    return rms_norm(input_D, scale_D, config.rms_norm_eps if eps is None else eps)


@cpu.variant(cpu.rms_norm)
# Without the checkpoint a float32 copy of every input would be kept for the backward pass.
@partial(jax.checkpoint, static_argnums=(2,))
def rms_norm(input_D: Array, scale_D: Array, eps: float) -> Array:
    """Apply the RMS norm with a float32 scale."""
    wide_D, scale_D = input_D.astype(jnp.float32), jnp.expand_dims(scale_D, tuple(range(input_D.ndim - 1)))
    inverse_1 = jax.lax.rsqrt(jnp.mean(jnp.square(wide_D), axis=-1, keepdims=True) + eps)
    return (wide_D * inverse_1 * scale_D).astype(input_D.dtype)
