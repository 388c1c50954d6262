"""Rows in which responses share their prompt, and the whole sequences that attention sees.

Everything but attention looks at one token at a time, so a prompt that several responses share
is computed once. Attention gets every sequence whole, prompt and response side by side, which
is what its kernels are made for.
"""

import jax.numpy as jnp
from flax import struct
from jaxtyping import Float

from jaxrlhf.batch import Array
from jaxrlhf.models.attention import XLA, Attention, attend
from jaxrlhf.models.scores import PLAIN, Scores


@struct.dataclass
class Spread:
    """Where the whole sequences of a row lie: in `A` rows of `S` tokens for attention.

    Attributes:
      source_RAS: int32 index in the row of the token that belongs here.
      segment_RAS: int32, sequences count from 1; 0 is padding.
      home_RW: int32 index in the row's `A * S` places at which a token finds its result: of a token in
        common, one of its copies, which are all alike.
    """

    source_RAS: Array
    segment_RAS: Array
    home_RW: Array


def attend_spread(
    query_RWNH: Float[Array, "R W N H"],
    key_RWKH: Float[Array, "R W K H"],
    value_RWKU: Float[Array, "R W K U"],
    spread: Spread,
    scores: Scores = PLAIN,
    *,
    attention: Attention = XLA,
) -> Float[Array, "R W N U"]:
    """As `attend`, over the sequences that `spread` makes of each row."""
    rows, attention_rows, row_tokens = spread.source_RAS.shape
    source_RE11 = spread.source_RAS.reshape(rows, -1)[:, :, None, None]

    def lay_out(head_RWNH: Array) -> Array:
        spread_RENH = jnp.take_along_axis(head_RWNH, source_RE11, axis=1)
        return spread_RENH.reshape(rows * attention_rows, row_tokens, *head_RWNH.shape[2:])

    segment_XS = spread.segment_RAS.reshape(-1, row_tokens)
    whole = lay_out(query_RWNH), lay_out(key_RWKH), lay_out(value_RWKU)
    mixed_XSNH = attend(*whole, segment_XS, scores, attention=attention)
    mixed_RENH = mixed_XSNH.reshape(rows, attention_rows * row_tokens, *mixed_XSNH.shape[2:])
    return jnp.take_along_axis(mixed_RENH, spread.home_RW[:, :, None, None], axis=1)
