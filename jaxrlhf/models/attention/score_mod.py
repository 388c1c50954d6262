"""Score modifications and masks: divisor, soft cap and sliding window of attention."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Bool, Float, Int

from jaxrlhf.batch import Array


class BothWays(NamedTuple):
    """Segments of packed rows, and the images inside them whose tokens see each other, numbered from 1."""

    segment_RW: Array
    block_RW: Array


class SharedTokens(NamedTuple):
    """Packed rows in which sequences share the tokens of their prompt, which come before those of each alone.

    Attributes:
      group_RW: int32 number of the prompt that a token belongs to, from 1; 0 is padding.
      own_RW: int32 number of the sequence that a token is of alone, from 1; 0 is shared by those of its prompt.
      position_RW: int32 position of a token in its sequences.
    """

    group_RW: Array
    own_RW: Array
    position_RW: Array


@struct.dataclass
class ScoreMod:
    """Scores of attention from products of queries and keys, and the window that a token sees.

    Attributes:
      divisor: Number that products are divided by; None is sqrt(H).
      soft_cap: Cap c, by which scores s become c tanh(s / c); None leaves them.
      window: Number of tokens that a token sees, itself included; None is all before it.
      slides: Flag of this layer, true if it has the window, where layers differ and one program computes them
        all; None has it in all.
      block_RW: int32 number of the image that a token of packed rows is of, from 1; tokens of one image see each other,
        whichever comes first. 0 is text; None has no images that do.
      sink_N: Score of each query head's sink, which takes a share of its softmax and has no value; None is none.

    Source of sinks: gpt-oss (arXiv:2508.10925), section 2.
    """

    divisor: float | None = struct.field(pytree_node=False, default=None)
    soft_cap: float | None = struct.field(pytree_node=False, default=None)
    window: int | None = struct.field(pytree_node=False, default=None)
    slides: Bool[Array, ""] | None = None
    sink_N: Float[Array, "N"] | None = None
    block_RW: Int[Array, "R W"] | None = None

    def divide_by(self, head_dim: int) -> float:
        """The divisor for heads of a width."""
        return math.sqrt(head_dim) if self.divisor is None else self.divisor

    def divided(self, query_H: Float[Array, "*batch H"]) -> Float[Array, "*batch H"]:
        """Queries whose products with keys need no division any more, in their own dtype.

        Divided in float32: a divisor of 16 bits is off by up to 2^-9, and with it all scores alike.
        """
        return (query_H.astype(jnp.float32) / self.divide_by(query_H.shape[-1])).astype(query_H.dtype)

    def cap(self, score: Float[Array, "*any"]) -> Float[Array, "*any"]:
        """Divided products to scores."""
        return score if self.soft_cap is None else self.soft_cap * jnp.tanh(score / self.soft_cap)

    def sinks(self, kv_heads: int) -> Float[Array, "K G"] | None:
        """float32 scores of sinks by key-value head and query head of it."""
        return None if self.sink_N is None else self.sink_N.astype(jnp.float32).reshape(kv_heads, -1)

    def first_seen(self, place: Int[Array, "*any"], start: Int[Array, "*more"]) -> Int[Array, "*more"]:
        """First position that the token at a place sees, of those from `start` on."""
        if self.window is None:
            return start
        near = jnp.maximum(place - self.window + 1, start)
        return near if self.slides is None else jnp.where(self.slides, near, start)

    def in_window(self, ago: Int[Array, "*any"], together: Bool[Array, "*more"] | None = None) -> Bool[Array, "*more"]:
        """True where a token sees the one that many positions before it.

        Args:
          together: True where both are of one image whose tokens see each other; None has no such.
        """
        seen = ago >= 0 if together is None else (ago >= 0) | together
        if self.window is None:
            return seen
        near = ago < self.window
        return seen & (near if self.slides is None else near | ~self.slides)


PLAIN = ScoreMod()
"""q . k / sqrt(H), of everything before."""

LOWEST = float(jnp.finfo(jnp.float32).min)
"""Finite score of hidden positions, for softmax in parts: minus infinity less itself is not a number."""


def mask_bias(seen: Bool[Array, "*any"], *, lowest: float = -jnp.inf) -> Float[Array, "*any"]:
    """Bias that hides scores that are not seen; XLA fuses a sum with the products before it, and not a selection."""
    return jnp.where(seen, 0.0, lowest)


def pad_positions(arrays: Any, *, multiple: int) -> Any:
    """A tree of `[R, W, ...]` arrays padded to a multiple of positions, which causal attention before does not see."""

    def pad(array: Array) -> Array:
        return jnp.pad(array, [(0, 0), (0, -array.shape[1] % multiple), *[(0, 0)] * (array.ndim - 2)])

    return jax.tree.map(pad, arrays)
