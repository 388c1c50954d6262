"""Rotary positions.

Source: Su et al. 2021 (arXiv:2104.09864), section 3.2; halves are rotated, not interleaved
pairs, as checkpoints in Hugging Face format expect.
"""

import math
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Float32, Int

from jaxrlhf.architecture import Llama3Rope, ModelConfig
from jaxrlhf.batch import Array


class Rotation(NamedTuple):
    """Cosines and sines of the angle of each position and each half-dimension; `X` is H / 2."""

    cos_RWX: Float32[Array, "R W X"]
    sin_RWX: Float32[Array, "R W X"]


def rotation(config: ModelConfig, position_RW: Int[Array, "R W"]) -> Rotation:
    """The rotation of each position: angle = position * frequency, in float32."""
    frequency_X = jnp.asarray(frequencies(config))
    angle_RWX = position_RW[:, :, None].astype(jnp.float32) * frequency_X[None, None, :]
    return Rotation(jnp.cos(angle_RWX), jnp.sin(angle_RWX))


def rotate(head_RWNH: Float[Array, "R W N H"], turn: Rotation) -> Float[Array, "R W N H"]:
    """Rotate each pair (i, i + H/2) of every head by its position's angle, in float32."""
    first, second = jnp.split(head_RWNH.astype(jnp.float32), 2, axis=-1)
    cos, sin = turn.cos_RWX[:, :, None, :], turn.sin_RWX[:, :, None, :]
    turned_RWNH = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned_RWNH.astype(head_RWNH.dtype)


def frequencies(config: ModelConfig) -> Float32[np.ndarray, "X"]:
    """Radians per position: theta^(-2i/H), stretched as the checkpoint's scaling says."""
    exponent_X = np.arange(0, config.head_dim, 2, dtype=np.float32) / np.float32(config.head_dim)
    frequency_X = (1.0 / np.float32(config.rope_theta) ** exponent_X).astype(np.float32)
    if config.rope_scaling is None:
        return frequency_X
    return _stretch(frequency_X, config.rope_scaling)


def _stretch(frequency_X: Float32[np.ndarray, "X"], scaling: Llama3Rope) -> Float32[np.ndarray, "X"]:
    """Divide low frequencies by `factor`, keep high ones, blend linearly in between.

    A frequency is judged by how many turns it makes within the original context.

    Source: Llama 3.1, as `rope_type: llama3` in transformers.
    """
    turns_X = scaling.original_max_position_embeddings * frequency_X / (2 * math.pi)
    kept_X = (turns_X - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept_X = np.clip(kept_X, 0.0, 1.0)
    return ((1 - kept_X) * frequency_X / scaling.factor + kept_X * frequency_X).astype(np.float32)
