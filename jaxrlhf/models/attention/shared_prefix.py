"""Rows in which responses share their prompt, and the whole sequences that attention sees.

Everything but attention looks at one token at a time, so a prompt that several responses share
is computed once. Attention gets every sequence whole, prompt and response side by side, which
is what its kernels are made for: a few sequences at a time, and as often as there are any, so that
one program serves batches of all lengths and costs what their lengths cost.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Float

from jaxrlhf.batch import Array
from jaxrlhf.models.attention.attention import XLA, Attention, attend
from jaxrlhf.models.attention.score_mod import PLAIN, ScoreMod

ATTENDED = "attended"
"""Name of what is worth keeping where layers are computed again: the loop that made it is then left out."""

_CHUNK_TOKENS = {"xla": 768}
"""Of a row, that are attended to at a time: on CPU as much as its caches hold."""
_MOST_CHUNK_TOKENS = 16_384


class AttentionRows(NamedTuple):
    """Sequences side by side in `A` rows of `S` tokens, for each packed row.

    Attributes:
      source_RAS: int32 index in the packed row of the token that belongs here.
      segment_RAS: int32, sequences count from 1; 0 is padding.
      tells_RAS: bool, whether the token takes its result from here: of a token in common one copy does, and
        all are alike.
      used_R: int32, attention rows that hold anything; they come first.
    """

    source_RAS: Array
    segment_RAS: Array
    tells_RAS: Array
    used_R: Array


class SharedPrefix(NamedTuple):
    """Where the whole sequences of packed rows lie: those of like lengths together."""

    parts: tuple[AttentionRows, ...]


def attend_shared_prefix(
    query_RWNH: Float[Array, "R W N H"],
    key_RWKH: Float[Array, "R W K H"],
    value_RWKU: Float[Array, "R W K U"],
    shared_prefix: SharedPrefix,
    score_mod: ScoreMod = PLAIN,
    *,
    attention: Attention = XLA,
) -> Float[Array, "R W N U"]:
    """As `attend`, over the sequences that `spread` makes of each row; 0 in padding."""
    how = replace(score_mod, slides=None), attention
    mixed_RWNU = _attend(query_RWNH, key_RWKH, value_RWKU, shared_prefix, score_mod.slides, how)
    return checkpoint_name(mixed_RWNU, ATTENDED)


_How = tuple[ScoreMod, Attention]
"""What a program is compiled for; whether there is a window in this layer is an argument."""


@partial(jax.custom_vjp, nondiff_argnums=(5,))
def _attend(
    query: Array, key: Array, value: Array, shared_prefix: SharedPrefix, slides: Array | None, how: _How
) -> Array:
    return _forward(query, key, value, shared_prefix, slides, how)[0]


def _forward(
    query: Array, key: Array, value: Array, shared_prefix: SharedPrefix, slides: Array | None, how: _How
) -> tuple[Array, Any]:
    score_mod, attention = replace(how[0], slides=slides), how[1]
    mixed_RWNU = _zeros(query, value.shape[-1], value.dtype)
    for part in shared_prefix.parts:
        chunks = _Chunks(part, attention)

        def put(index: Array, mixed_RWNU: Array, chunks: _Chunks = chunks) -> Array:
            source_RE, segment_XS, tells_RE = chunks.at(index)
            query_X, key_X, value_X = (chunks.lay_out(array, source_RE) for array in (query, key, value))
            part_RENU = chunks.back(attend(query_X, key_X, value_X, segment_XS, score_mod, attention=attention))
            target_RE = jnp.where(tells_RE, source_RE, mixed_RWNU.shape[1])
            return jax.vmap(lambda mixed, at, new: mixed.at[at].set(new, mode="drop"))(mixed_RWNU, target_RE, part_RENU)

        mixed_RWNU = chunks.over(put, mixed_RWNU)
    return mixed_RWNU, (query, key, value, shared_prefix, slides)


def _backward(how: _How, saved: Any, change_RWNU: Array) -> tuple[Any, ...]:
    """Each chunk is attended to again; what copies of a token ask for is summed in float32."""
    *arrays, shared_prefix, slides = saved
    score_mod, attention = replace(how[0], slides=slides), how[1]
    sums = [_zeros(array, array.shape[-1], jnp.float32) for array in arrays]
    for part in shared_prefix.parts:
        chunks = _Chunks(part, attention)

        def add(index: Array, sums: list[Array], chunks: _Chunks = chunks) -> list[Array]:
            source_RE, segment_XS, tells_RE = chunks.at(index)
            whole = [chunks.lay_out(array, source_RE) for array in arrays]
            _, pull = jax.vjp(lambda q, k, v: attend(q, k, v, segment_XS, score_mod, attention=attention), *whole)
            change_XSNU = chunks.lay_out(change_RWNU, source_RE) * tells_RE.reshape(segment_XS.shape)[..., None, None]
            plus = jax.vmap(lambda total, at, more: total.at[at].add(more))
            changes = map(chunks.back, pull(change_XSNU))
            return [plus(total, source_RE, more) for total, more in zip(sums, changes, strict=True)]

        sums = chunks.over(add, sums)
    return *(total.astype(array.dtype) for total, array in zip(sums, arrays, strict=True)), None, None


_attend.defvjp(_forward, _backward)


class _Chunks:
    """Attention rows, some of each packed row at a time; E are the places of a chunk, X its rows."""

    def __init__(self, part: AttentionRows, attention: Attention) -> None:
        self._rows: int
        self._width: int
        self._rows, count, self._width = part.source_RAS.shape
        tokens = _CHUNK_TOKENS.get(attention.rows, _MOST_CHUNK_TOKENS)
        self._size = min(count, max(1, tokens // self._width))
        self._chunks = -(-part.used_R.max() // self._size)
        more = ((0, 0), (0, -count % self._size), (0, 0))
        self._tables = [jnp.pad(table, more) for table in (part.source_RAS, part.segment_RAS, part.tells_RAS)]

    def over(self, body: Callable[[Any, Any], Any], carry: Any) -> Any:
        """What is carried through the body of every chunk that holds anything."""
        return lax.fori_loop(0, self._chunks, body, carry)

    def at(self, index: Array) -> tuple[Array, Array, Array]:
        """Sources and whether they tell, `[R, E]`, and the segments between them, `[X, S]`."""
        source_RCS, segment_RCS, tells_RCS = (
            lax.dynamic_slice_in_dim(table, index * self._size, self._size, axis=1) for table in self._tables
        )
        return (
            source_RCS.reshape(self._rows, -1),
            segment_RCS.reshape(-1, self._width),
            tells_RCS.reshape(self._rows, -1),
        )

    def lay_out(self, array_RWNH: Array, source_RE: Array) -> Array:
        """Tokens of packed rows as `[X, S, N, H]`."""
        array_RENH = jnp.take_along_axis(array_RWNH, source_RE[:, :, None, None], axis=1)
        return array_RENH.reshape(-1, self._width, *array_RWNH.shape[2:])

    def back(self, array_XSNH: Array) -> Array:
        """`[X, S, N, H]` as `[R, E, N, H]`."""
        return array_XSNH.reshape(self._rows, -1, *array_XSNH.shape[2:])


def _zeros(array_RWNH: Array, width: int, dtype: Any) -> Array:
    """`[R, W, N, width]`, varying over devices of a manual mesh axis as the array does, so that a loop can carry it."""
    zero_RWN1 = jnp.where(False, array_RWNH[..., :1], 0).astype(dtype)
    return jnp.broadcast_to(zero_RWN1, (*array_RWNH.shape[:-1], width))
