"""Score modifications of attention: divisor, soft cap, sliding window and sinks."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Bool, Float, Int

from jaxrlhf.batch import Array


@struct.dataclass
class ScoreMod:
    """Attention scores from products of queries and keys, and the window that a token sees.

    Attributes:
      divisor: Divisor of the products; None is sqrt(H).
      soft_cap: Cap c of scores s, c tanh(s / c); None is no cap.
      window: Number of tokens that a token sees, itself included; None is all tokens before it.
      slides: Flag of this layer, true if it has the window, for programs that compute layers with and without the
        window; None means that all layers have the window.
      sink_N: Score of each query head's sink, which takes a share of its softmax and has no value; None is none.

    Source of sinks: gpt-oss (arXiv:2508.10925), section 2.
    """

    divisor: float | None = struct.field(pytree_node=False, default=None)
    soft_cap: float | None = struct.field(pytree_node=False, default=None)
    window: int | None = struct.field(pytree_node=False, default=None)
    slides: Bool[Array, ""] | None = None
    sink_N: Float[Array, "N"] | None = None

    def divide_by(self, head_dim: int) -> float:
        """Return the divisor for heads of width `head_dim`."""
        return math.sqrt(head_dim) if self.divisor is None else self.divisor

    def divided(self, query_H: Float[Array, "*batch H"]) -> Float[Array, "*batch H"]:
        """Divide queries, so that their products with keys need no division; their dtype stays.

        The division is in float32: a 16-bit divisor is off by up to 2^-9, and would scale all scores by this error.
        """
        return (query_H.astype(jnp.float32) / self.divide_by(query_H.shape[-1])).astype(query_H.dtype)

    def cap(self, score: Float[Array, "*any"]) -> Float[Array, "*any"]:
        """Apply the soft cap to divided products."""
        return score if self.soft_cap is None else self.soft_cap * jnp.tanh(score / self.soft_cap)

    def sinks(self, kv_heads: int) -> Float[Array, "K G"] | None:
        """Return the float32 scores of sinks, by key-value head and its query heads."""
        return None if self.sink_N is None else self.sink_N.astype(jnp.float32).reshape(kv_heads, -1)

    def first_seen(self, place: Int[Array, "*any"], start: Int[Array, "*more"]) -> Int[Array, "*more"]:
        """Return the first position, from `start` on, that the token at position `place` sees."""
        if self.window is None:
            return start
        near = jnp.maximum(place - self.window + 1, start)
        return near if self.slides is None else jnp.where(self.slides, near, start)

    def in_window(self, ago: Int[Array, "*any"], together: Bool[Array, "*more"] | None = None) -> Bool[Array, "*more"]:
        """Return true where a token sees the token `ago` positions before it.

        Args:
          together: True where both tokens are of one image whose tokens see each other; None has no such images.
        """
        seen = ago >= 0 if together is None else (ago >= 0) | together
        if self.window is None:
            return seen
        near = ago < self.window
        return seen & (near if self.slides is None else near | ~self.slides)


PLAIN = ScoreMod()
"""Scores q . k / sqrt(H), over all tokens before."""

LOWEST = float(jnp.finfo(jnp.float32).min)
"""Finite score of hidden positions, for softmax in parts: minus infinity minus itself is NaN."""


def mask_bias(seen: Bool[Array, "*any"], *, lowest: float = -jnp.inf) -> Float[Array, "*any"]:
    """Return the bias that hides unseen scores. XLA fuses a sum with the products before it, but not a selection."""
    return jnp.where(seen, 0.0, lowest)


def pad_positions(arrays: Any, *, multiple: int) -> Any:
    """Pad a tree of `[R, W, ...]` arrays to a multiple of positions. Causal attention never sees the padding."""

    def pad(array: Array) -> Array:
        return jnp.pad(array, [(0, 0), (0, -array.shape[1] % multiple), *[(0, 0)] * (array.ndim - 2)])

    return jax.tree.map(pad, arrays)
