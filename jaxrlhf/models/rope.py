"""Rotary positions (RoPE).

Source: Su et al. 2021 (arXiv:2104.09864), section 3.2. Halves are rotated, not interleaved pairs, as most checkpoints
in Hugging Face format expect.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Float32, Int

from jaxrlhf.batch import Array
from jaxrlhf.models.config import (
    LAYERS,
    LinearRope,
    Llama3Rope,
    LongRope,
    ModelConfig,
    ProportionalRope,
    RopeScaling,
    YarnRope,
)
from jaxrlhf.models.kernels import cpu


class Rotation(NamedTuple):
    """Cosines and sines of the angle of each position and each pair; `X` is half of the rotated width."""

    cos_RWX: Float32[Array, "R W X"]
    sin_RWX: Float32[Array, "R W X"]


class Rotations(NamedTuple):
    """Rotations of layers without a window, and of layers with a window if they differ.

    Attributes:
      growth_RW: float32 factor of queries in all layers, by position; None is 1.
    """

    full: Rotation
    sliding: Rotation | None
    growth_RW: Array | None = None

    def of_layer(self, slides: Bool[Array, ""] | bool, turns: Bool[Array, ""] | None = None) -> Rotation:
        """Return the rotation of a layer.

        Args:
          slides: Flag of the layer, or of all layers of its stack; true if it has the window.
          turns: Flag of the layer, false if it does not rotate; None if all layers rotate.
        """
        turn = self.full
        if self.sliding is not None and slides is True:
            turn = self.sliding
        elif self.sliding is not None and slides is not False:
            turn = jax.tree.map(lambda near, far: jnp.where(slides, near, far), self.sliding, self.full)
        if turns is not None:
            turn = Rotation(jnp.where(turns, turn.cos_RWX, 1.0), jnp.where(turns, turn.sin_RWX, 0.0))
        return turn

    def grown(self, query_RWNH: Float[Array, "R W N H"]) -> Float[Array, "R W N H"]:
        """Multiply queries by the growth factor of their positions."""
        if self.growth_RW is None:
            return query_RWNH
        return (query_RWNH * self.growth_RW[:, :, None, None]).astype(query_RWNH.dtype)


def rotations(
    config: ModelConfig,
    position_RW: Int[Array, "R W"],
    *,
    longest: int | None = None,
    mrope_position_RW3: Int[Array, "R W 3"] | None = None,
) -> Rotations:
    """Compute the rotation of each position: angle = position * frequency, in float32.

    Args:
      longest: Bound on the positions, with which a decode loop may look rotations up in a table; None computes them.
      mrope_position_RW3: Time, row and column of each token, if each frequency uses one of the three (multimodal RoPE);
        None uses `position_RW` for all frequencies.
    """
    part_X = None
    if mrope_position_RW3 is not None and config.vision is not None and config.vision.sections is not None:
        part_X = np.array(config.vision.sections.part_of())

    def turn(dims: int, theta: float, scaling: RopeScaling | None) -> Rotation:
        frequency_X, factor = frequencies(dims, theta, scaling)

        def at(position_RW: Array) -> Rotation:
            angle_RWX = position_RW[:, :, None].astype(jnp.float32) * jnp.asarray(frequency_X)[None, None, :]
            if part_X is not None and mrope_position_RW3 is not None:
                angle_RWX = (
                    mrope_position_RW3[:, :, part_X].astype(jnp.float32) * jnp.asarray(frequency_X)[None, None, :]
                )
            return Rotation(jnp.cos(angle_RWX) * factor, jnp.sin(angle_RWX) * factor)

        return _at_positions(at, position_RW, longest)

    full, sliding = turn(config.of_stack(LAYERS).rotary_dim, config.rope_theta, config.rope_scaling), None
    if config.sliding_rope_theta is not None:
        sliding = turn(config.rotary_dim, config.sliding_rope_theta, None)
    elif config.full_heads is not None:
        sliding = turn(config.rotary_dim, config.rope_theta, config.rope_scaling)
    return Rotations(full, sliding, query_growth(config.rope_scaling, position_RW))


def query_growth(scaling: RopeScaling | None, position_RW: Int[Array, "R W"]) -> Float32[Array, "R W"] | None:
    """Compute the growth factor of queries, 1 + beta ln(1 + floor(position / original context)); None is no growth.

    Source: Llama 4, as `llama_4_scaling_beta` in transformers.
    """
    if not isinstance(scaling, YarnRope) or scaling.llama_4_scaling_beta is None:
        return None
    contexts_RW = (position_RW // scaling.original_max_position_embeddings).astype(jnp.float32)
    return 1 + scaling.llama_4_scaling_beta * jnp.log1p(contexts_RW)


@cpu.variant(cpu.look_up)
def _at_positions(function: Callable[[Array], Rotation], position_RW: Array, longest: int | None) -> Rotation:
    return function(position_RW)


def rotate(head_RWNH: Float[Array, "R W N H"], turn: Rotation, *, interleaved: bool = False) -> Float[Array, "R W N H"]:
    """Rotate each pair (i, i + X) of every head by its position's angle, in float32; later dimensions stay unchanged.

    Args:
      interleaved: True if pairs are (2i, 2i + 1) in the input; they are (i, i + X) in the output.
    """
    half = turn.cos_RWX.shape[-1]
    wide_RWNH = head_RWNH.astype(jnp.float32)
    first, second, rest = wide_RWNH[..., :half], wide_RWNH[..., half : 2 * half], wide_RWNH[..., 2 * half :]
    if interleaved:
        first, second = wide_RWNH[..., : 2 * half : 2], wide_RWNH[..., 1 : 2 * half : 2]
    cos, sin = turn.cos_RWX[:, :, None, :], turn.sin_RWX[:, :, None, :]
    turned_RWNH = jnp.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)
    return turned_RWNH.astype(head_RWNH.dtype)


def frequencies(dims: int, theta: float, scaling: RopeScaling | None) -> tuple[Float32[np.ndarray, "X"], float]:
    """Return radians per position, theta^(-2i/dims) stretched by a scaling, and the factor of cosines and sines."""
    exponent_X = np.arange(0, dims, 2, dtype=np.float32) / np.float32(dims)
    frequency_X = (1.0 / np.float32(theta) ** exponent_X).astype(np.float32)
    match scaling:
        case None:
            return frequency_X, 1.0
        case LinearRope():
            return frequency_X / np.float32(scaling.factor), 1.0
        case Llama3Rope():
            return _llama3(frequency_X, scaling), 1.0
        case YarnRope():
            return _yarn(frequency_X, theta, scaling), _magnitude(scaling)
        case LongRope():
            return frequency_X / np.asarray(scaling.short_factor, np.float32), scaling.attention_factor
        case ProportionalRope():
            turned = int(scaling.partial_rotary_factor * dims // 2)
            frequency_X[turned:] = 0
            return frequency_X / np.float32(scaling.factor or 1), 1.0


def _magnitude(scaling: YarnRope) -> float:
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale and scaling.mscale_all_dim:
        return scaling.magnitude(scaling.mscale) / scaling.magnitude(scaling.mscale_all_dim)
    return scaling.magnitude()


def _llama3(frequency_X: Float32[np.ndarray, "X"], scaling: Llama3Rope) -> Float32[np.ndarray, "X"]:
    """Divide low frequencies by `factor`, keep high frequencies, and blend linearly in between.

    Low and high are defined by the number of turns that a frequency makes within the original context.

    Source: Llama 3.1, as `rope_type: llama3` in transformers.
    """
    turns_X = scaling.original_max_position_embeddings * frequency_X / (2 * math.pi)
    kept_X = (turns_X - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    return _blend(frequency_X, scaling.factor, np.clip(kept_X, 0.0, 1.0))


def _yarn(frequency_X: Float32[np.ndarray, "X"], theta: float, scaling: YarnRope) -> Float32[np.ndarray, "X"]:
    """Keep frequencies of `beta_fast` turns and more, divide frequencies of `beta_slow` and less, blend in between.

    Source: Peng et al. 2023 (arXiv:2309.00071), section 3.2, as `rope_type: yarn` in transformers.
    """
    half = len(frequency_X)

    def place(turns: float) -> float:
        """Return the fractional index of the frequency that makes `turns` turns in the original context."""
        context = scaling.original_max_position_embeddings / (turns * 2 * math.pi)
        return half * math.log(context) / math.log(theta)

    low, high = place(scaling.beta_fast), place(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * half - 1)
    # Both may be the same index; the blend is then a step just after it.
    stretched_X = np.clip((np.arange(half, dtype=np.float32) - low) / max(high - low, 1e-3), 0.0, 1.0)
    return _blend(frequency_X, scaling.factor, 1 - stretched_X)


def _blend(frequency_X: np.ndarray, factor: float, kept_X: np.ndarray) -> Float32[np.ndarray, "X"]:
    """Average each frequency and the frequency divided by the factor, with weights `kept_X` and 1 - `kept_X`."""
    return ((1 - kept_X) * frequency_X / factor + kept_X * frequency_X).astype(np.float32)
