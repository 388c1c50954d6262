"""Shared-prefix attention: packed rows hold a prompt once for all its responses.

Layers but attention compute one token at a time, so a shared prompt is computed once. Attention gets
every sequence whole, prompt and response side by side, as its kernels want it: a few sequences at a time
in a loop, so that one program serves batches of all lengths and costs what their lengths cost.
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
from jaxrlhf.models.attention.attention import attend
from jaxrlhf.models.attention.score_mod import PLAIN, ScoreMod
from jaxrlhf.models.execution import ONE_DEVICE, Execution

ATTENDED = "attended"
"""Name of attention outputs, which rematerialisation keeps so that the loop is not run again."""

_CHUNK_TOKENS = {"xla": 768}
"""Tokens of a row that one round of the loop attends to, by kernel: on CPU as much as its caches hold."""
_MOST_CHUNK_TOKENS = 16_384


class AttentionRows(NamedTuple):
    """Sequences side by side in `A` rows of `S` tokens, for each packed row.

    Attributes:
      source_RAS: int32 index of the token in the packed row.
      segment_RAS: int32 number of the sequence, from 1; 0 is padding.
      tells_RAS: bool, true for the one copy of a token that its result is read from; all copies are alike.
      used_R: int32 number of attention rows that hold anything; they come first.
    """

    source_RAS: Array
    segment_RAS: Array
    tells_RAS: Array
    used_R: Array


class SharedPrefix(NamedTuple):
    """Whole sequences of packed rows, those of like lengths together."""

    parts: tuple[AttentionRows, ...]


def attend_shared_prefix(
    query_RWNH: Float[Array, "R W N H"],
    key_RWKH: Float[Array, "R W K H"],
    value_RWKU: Float[Array, "R W K U"],
    shared_prefix: SharedPrefix,
    score_mod: ScoreMod = PLAIN,
    *,
    execution: Execution = ONE_DEVICE,
) -> Float[Array, "R W N U"]:
    """Attention of packed rows in which sequences share tokens; 0 in padding."""
    static = replace(score_mod, slides=None), execution
    mixed_RWNU = _attend(query_RWNH, key_RWKH, value_RWKU, shared_prefix, score_mod.slides, static)
    return checkpoint_name(mixed_RWNU, ATTENDED)


_Static = tuple[ScoreMod, Execution]
"""Static arguments of a program; the flag of a layer's window is traced."""


@partial(jax.custom_vjp, nondiff_argnums=(5,))
def _attend(
    query: Array, key: Array, value: Array, shared_prefix: SharedPrefix, slides: Array | None, static: _Static
) -> Array:
    return _forward(query, key, value, shared_prefix, slides, static)[0]


def _forward(
    query: Array, key: Array, value: Array, shared_prefix: SharedPrefix, slides: Array | None, static: _Static
) -> tuple[Array, Any]:
    score_mod, execution = replace(static[0], slides=slides), static[1]
    mixed_RWNU = _zeros(query, value.shape[-1], value.dtype)
    for part in shared_prefix.parts:
        chunks = _Chunks(part, execution)

        def put(index: Array, mixed_RWNU: Array, chunks: _Chunks = chunks) -> Array:
            source_RE, segment_XS, tells_RE = chunks.at(index)
            query_X, key_X, value_X = (chunks.lay_out(array, source_RE) for array in (query, key, value))
            part_RENU = chunks.back(attend(query_X, key_X, value_X, segment_XS, score_mod, execution=execution))
            target_RE = jnp.where(tells_RE, source_RE, mixed_RWNU.shape[1])
            return jax.vmap(lambda mixed, at, new: mixed.at[at].set(new, mode="drop"))(mixed_RWNU, target_RE, part_RENU)

        mixed_RWNU = chunks.over(put, mixed_RWNU)
    return mixed_RWNU, (query, key, value, shared_prefix, slides)


def _backward(static: _Static, saved: Any, change_RWNU: Array) -> tuple[Any, ...]:
    """Gradients: each chunk is attended to again, and gradients of a token's copies are summed in float32."""
    *arrays, shared_prefix, slides = saved
    score_mod, execution = replace(static[0], slides=slides), static[1]
    sums = [_zeros(array, array.shape[-1], jnp.float32) for array in arrays]
    for part in shared_prefix.parts:
        chunks = _Chunks(part, execution)

        def add(index: Array, sums: list[Array], chunks: _Chunks = chunks) -> list[Array]:
            source_RE, segment_XS, tells_RE = chunks.at(index)
            whole = [chunks.lay_out(array, source_RE) for array in arrays]
            _, pull = jax.vjp(lambda q, k, v: attend(q, k, v, segment_XS, score_mod, execution=execution), *whole)
            change_XSNU = chunks.lay_out(change_RWNU, source_RE) * tells_RE.reshape(segment_XS.shape)[..., None, None]
            plus = jax.vmap(lambda total, at, more: total.at[at].add(more))
            changes = map(chunks.back, pull(change_XSNU))
            return [plus(total, source_RE, more) for total, more in zip(sums, changes, strict=True)]

        sums = chunks.over(add, sums)
    return *(total.astype(array.dtype) for total, array in zip(sums, arrays, strict=True)), None, None


_attend.defvjp(_forward, _backward)


class _Chunks:
    """Loop over attention rows, some of each packed row at a time; E are the places of a chunk, X its rows."""

    def __init__(self, part: AttentionRows, execution: Execution) -> None:
        self._rows: int
        self._width: int
        self._rows, count, self._width = part.source_RAS.shape
        tokens = _CHUNK_TOKENS.get(execution.rows_kernel, _MOST_CHUNK_TOKENS)
        self._size = min(count, max(1, tokens // self._width))
        self._chunks = -(-part.used_R.max() // self._size)
        padding = ((0, 0), (0, -count % self._size), (0, 0))
        self._tables = [jnp.pad(table, padding) for table in (part.source_RAS, part.segment_RAS, part.tells_RAS)]

    def over(self, body: Callable[[Any, Any], Any], carry: Any) -> Any:
        """Run the body on every chunk that holds anything."""
        return lax.fori_loop(0, self._chunks, body, carry)

    def at(self, index: Array) -> tuple[Array, Array, Array]:
        """Sources `[R, E]`, segments `[X, S]`, and flags of copies that tell `[R, E]`."""
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
