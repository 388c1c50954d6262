"""Flash attention of packed rows on GPU, in the signature of `attend`: no array has two dimensions of a row's length.

The mask of a causal row of segments is one number for each position: the first visible position. Windows move this
number, also if only single layers of a program have a window. Key tiles outside of the range that the queries of a tile
see are not read, so the cost of a row is the cost of its sequences.

Source: Dao et al. 2022 (FlashAttention, arXiv:2205.14135), algorithms 1 and 4.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Float, Int

from jaxrlhf.batch import Array
from jaxrlhf.models.attention.score_mod import LOWEST, PLAIN, ScoreMod, pad_positions

_TILE = 64
"""Number of queries, and of keys, of a tile; halved for heads wider than 128, and halved in the backward pass."""

_NARROWEST_HEAD = 16
"""Fewest numbers that tensor cores sum over."""


def flash_rows(
    query_RWNH: Float[Array, "R W N H"],
    key_RWKH: Float[Array, "R W K H"],
    value_RWKH: Float[Array, "R W K H"],
    segment_RW: Int[Array, "R W"],
    score_mod: ScoreMod = PLAIN,
    *,
    interpret: bool = False,
) -> Float[Array, "R W N H"]:
    """Compute flash attention whose tiles are masked by position alone; heads are padded to powers of two."""
    _, width, _, head_dim = query_RWNH.shape
    wide = max(_NARROWEST_HEAD, pl.next_power_of_2(head_dim))
    query, key, value, segment = pad_positions((query_RWNH, key_RWKH, value_RWKH, segment_RW), multiple=_TILE)
    padding = ((0, 0), (0, 0), (0, 0), (0, wide - head_dim))
    query, key, value = (jnp.pad(array, padding) for array in (query, key, value))
    scores = _Scores(score_mod.divide_by(head_dim), score_mod.soft_cap, interpret)
    out_RWNH = _flash(query, key, value, score_mod.sink_N, first_seen(segment, score_mod), scores)
    return out_RWNH[:, :width, :, :head_dim]


def first_seen(segment_RW: Int[Array, "R W"], score_mod: ScoreMod) -> Int[Array, "R W"]:
    """Return the first position that each position sees: the later of its segment's start and its window's start."""
    position_1W = jnp.arange(segment_RW.shape[1], dtype=jnp.int32)[None]
    changes_RW = jnp.diff(segment_RW, axis=1, prepend=segment_RW[:, :1]) != 0
    start_RW = lax.cummax(jnp.where(changes_RW, position_1W, 0), axis=1)
    return score_mod.first_seen(position_1W, start_RW)


class _Scores(NamedTuple):
    """Settings of attention scores: divisor, soft cap, and the interpret mode of Pallas."""

    divisor: float
    cap: float | None
    interpret: bool

    def of(self, query_QH: Array, key_SH: Array) -> tuple[Array, Array | float]:
        """Return the scores of a tile, and the derivative of their soft cap."""
        score_QS = _product(query_QH, key_SH.T) / self.divisor
        if self.cap is None:
            return score_QS, 1.0
        tanh_QS = 2 * jax.nn.sigmoid(2 * score_QS / self.cap) - 1  # Triton has exponentials
        return self.cap * tanh_QS, 1 - tanh_QS * tanh_QS


def _product(left: Array, right: Array) -> Array:
    """Compute a matrix product in float32; tensor cores multiply half-precision inputs."""
    precision = lax.Precision.HIGHEST if left.dtype == jnp.float32 else None
    return triton.dot(left, right, precision=precision)


@partial(jax.custom_vjp, nondiff_argnums=(5,))
def _flash(
    query_RWNH: Array, key_RWKH: Array, value_RWKH: Array, sink_N: Array | None, first_RW: Array, scores: _Scores
) -> Array:
    return _forward(query_RWNH, key_RWKH, value_RWKH, sink_N, first_RW, scores)[0]


def _forward(
    query_RWNH: Array, key_RWKH: Array, value_RWKH: Array, sink_N: Array | None, first_RW: Array, scores: _Scores
) -> tuple[Array, tuple[Array | None, ...]]:
    rows, width, heads, _ = query_RWNH.shape
    specs = _Specs(query_RWNH, key_RWKH, _tile(query_RWNH))
    out_RWNH, norm_RNW = _call(
        partial(_forward_tile, scores=scores),
        specs.grid(heads),
        [specs.positions, specs.queries, specs.all_keys, specs.all_keys],
        [specs.queries, specs.of_queries],
        [query_RWNH, jax.ShapeDtypeStruct((rows, heads, width), jnp.float32)],
        scores,
    )(first_RW, query_RWNH, key_RWKH, value_RWKH)
    if sink_N is not None:  # the sink takes its share of the softmax weights of the keys
        whole_RNW = jnp.logaddexp(norm_RNW, sink_N.astype(jnp.float32)[None, :, None])
        left_RWN = jnp.swapaxes(jnp.exp(norm_RNW - whole_RNW), 1, 2)
        out_RWNH, norm_RNW = (out_RWNH * left_RWN[..., None]).astype(out_RWNH.dtype), whole_RNW
    return out_RWNH, (query_RWNH, key_RWKH, value_RWKH, sink_N, first_RW, out_RWNH, norm_RNW)


def _backward(scores: _Scores, saved: tuple[Any, ...], change_RWNH: Array) -> tuple[Array | None, ...]:
    query_RWNH, key_RWKH, value_RWKH, sink_N, first_RW, out_RWNH, norm_RNW = saved
    heads, kv_heads = query_RWNH.shape[2], key_RWKH.shape[2]
    pull_RNW = jnp.einsum("RWNH,RWNH->RNW", out_RWNH, change_RWNH, preferred_element_type=jnp.float32)
    specs = _Specs(query_RWNH, key_RWKH, _tile(query_RWNH) // 2)
    position_W = jnp.arange(first_RW.shape[1])
    # `first_RW` never decreases along a row, so the queries that see a key are contiguous.
    last_RW = jax.vmap(partial(jnp.searchsorted, v=position_W, side="right"))(first_RW).astype(jnp.int32) - 1
    of_query = (change_RWNH, norm_RNW, pull_RNW)
    change_query = _call(
        partial(_query_tile, scores=scores),
        specs.grid(heads),
        [specs.positions, specs.queries, specs.all_keys, specs.all_keys, specs.queries, *[specs.of_queries] * 2],
        specs.queries,
        query_RWNH,
        scores,
    )(first_RW, query_RWNH, key_RWKH, value_RWKH, *of_query)
    change_key, change_value = _call(
        partial(_key_tile, scores=scores),
        specs.grid(kv_heads),
        [
            specs.positions,
            specs.all_positions,
            specs.queries_of_key,
            specs.keys,
            specs.keys,
            specs.queries_of_key,
            *[specs.all_of_queries] * 2,
        ],
        [specs.keys, specs.keys],
        [key_RWKH, value_RWKH],
        scores,
    )(last_RW, first_RW, query_RWNH, key_RWKH, value_RWKH, *of_query)
    change_sink = None
    if sink_N is not None:
        taken_RNW = jnp.exp(sink_N.astype(jnp.float32)[None, :, None] - norm_RNW)
        change_sink = -(taken_RNW * pull_RNW).sum(axis=(0, 2)).astype(sink_N.dtype)
    return change_query, change_key, change_value, change_sink, None


_flash.defvjp(_forward, _backward)


def _tile(query_RWNH: Array) -> int:
    return _TILE if query_RWNH.shape[-1] <= 128 else _TILE // 2


class _Specs:
    """Block specs of the arrays that a program reads and writes, by row, head and tile."""

    def __init__(self, query_RWNH: Array, key_RWKH: Array, tile: int) -> None:
        rows, width, heads, head_dim = query_RWNH.shape
        group = heads // key_RWKH.shape[2]
        self._rows, self._tiles = rows, width // tile
        self.positions = pl.BlockSpec((None, tile), lambda r, n, i: (r, i))
        self.all_positions = pl.BlockSpec((None, width), lambda r, n, i: (r, 0))
        self.queries = pl.BlockSpec((None, tile, None, head_dim), lambda r, n, i: (r, i, n, 0))
        self.keys = self.queries
        self.of_queries = pl.BlockSpec((None, None, tile), lambda r, n, i: (r, n, i))
        self.all_keys = pl.BlockSpec((None, width, None, head_dim), lambda r, n, i: (r, 0, n // group, 0))
        self.queries_of_key = pl.BlockSpec((None, width, group, head_dim), lambda r, k, i: (r, 0, k, 0))
        self.all_of_queries = pl.BlockSpec((None, group, width), lambda r, k, i: (r, k, 0))

    def grid(self, heads: int) -> tuple[int, int, int]:
        """Return the grid of programs: rows, heads and tiles."""
        return self._rows, heads, self._tiles


def _call(kernel: Callable[..., None], grid: tuple[int, ...], inputs: Any, outputs: Any, like: Any, scores: _Scores):
    return pl.pallas_call(
        kernel,
        grid=grid,
        in_specs=inputs,
        out_specs=outputs,
        out_shape=jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype), like),
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=2),
        interpret=scores.interpret,
        name="flash_rows",
    )


def _forward_tile(first_ref, query_ref, key_ref, value_ref, out_ref, norm_ref, *, scores: _Scores) -> None:
    """Write the attention output of a tile of queries, and the log-sum-exp of their scores."""
    query_QH, first_Q = query_ref[...], first_ref[...]
    tile = query_QH.shape[0]
    place_Q = pl.program_id(2) * tile + jnp.arange(tile)

    def body(index, carry):
        out_QH, sum_Q, most_Q = carry
        keys = pl.ds(index * tile, tile)
        score_QS, _ = scores.of(query_QH, triton.load(key_ref.at[keys, :]))
        place_S = index * tile + jnp.arange(tile)
        score_QS = jnp.where(_seen(place_Q, place_S, first_Q), score_QS, LOWEST)
        next_Q = jnp.maximum(most_Q, score_QS.max(axis=1))
        kept_Q, weight_QS = jnp.exp(most_Q - next_Q), jnp.exp(score_QS - next_Q[:, None])
        value_SH = triton.load(value_ref.at[keys, :])
        new_QH = _product(weight_QS.astype(value_SH.dtype), value_SH)
        return kept_Q[:, None] * out_QH + new_QH, kept_Q * sum_Q + weight_QS.sum(axis=1), next_Q

    # Sums over keys before the first visible key vanish: the largest score is LOWEST until then, so `kept_Q` becomes 0.
    zero_Q = jnp.zeros(tile, jnp.float32)
    start = jnp.zeros(query_QH.shape, jnp.float32), zero_Q, zero_Q + LOWEST
    out_QH, sum_Q, most_Q = lax.fori_loop(first_Q.min() // tile, pl.program_id(2) + 1, body, start)
    out_ref[...] = (out_QH / sum_Q[:, None]).astype(out_ref.dtype)
    norm_ref[...] = most_Q + jnp.log(sum_Q)


def _seen(place_Q, place_S, first_Q):
    return (place_S[None, :] <= place_Q[:, None]) & (place_S[None, :] >= first_Q[:, None])


def _gradients(scores: _Scores, seen_QS, query_QH, key_SH, value_SH, change_QH, norm_Q, pull_Q) -> tuple[Array, Array]:
    """Return the softmax weights p of a tile, and the gradient of its query-key products:

    p = exp(s - norm)        d(q . k) = p (do . v - do . o) slope / divisor

    The slope is the derivative of the soft cap.
    """
    score_QS, slope_QS = scores.of(query_QH, key_SH)
    weight_QS = jnp.where(seen_QS, jnp.exp(score_QS - norm_Q[:, None]), 0.0)
    pulled_QS = _product(change_QH, value_SH.T) - pull_Q[:, None]
    return weight_QS, weight_QS * pulled_QS * slope_QS / scores.divisor


def _query_tile(
    first_ref, query_ref, key_ref, value_ref, change_ref, norm_ref, pull_ref, out_ref, *, scores: _Scores
) -> None:
    """Write the gradient of a tile of queries."""
    query_QH, first_Q = query_ref[...], first_ref[...]
    change_QH, norm_Q, pull_Q = change_ref[...], norm_ref[...], pull_ref[...]
    tile = query_QH.shape[0]
    place_Q = pl.program_id(2) * tile + jnp.arange(tile)

    def body(index, sum_QH):
        keys = pl.ds(index * tile, tile)
        key_SH, value_SH = triton.load(key_ref.at[keys, :]), triton.load(value_ref.at[keys, :])
        seen_QS = _seen(place_Q, index * tile + jnp.arange(tile), first_Q)
        _, product_QS = _gradients(scores, seen_QS, query_QH, key_SH, value_SH, change_QH, norm_Q, pull_Q)
        return sum_QH + _product(product_QS.astype(key_SH.dtype), key_SH)

    zero_QH = jnp.zeros(query_QH.shape, jnp.float32)
    sum_QH = lax.fori_loop(first_Q.min() // tile, pl.program_id(2) + 1, body, zero_QH)
    out_ref[...] = sum_QH.astype(out_ref.dtype)


def _key_tile(
    last_ref,
    first_ref,
    query_ref,
    key_ref,
    value_ref,
    change_ref,
    norm_ref,
    pull_ref,
    key_out_ref,
    value_out_ref,
    *,
    scores: _Scores,
) -> None:
    """Write the gradients of a tile of keys and values, summed over the query heads that share them."""
    key_SH, value_SH = key_ref[...], value_ref[...]
    tile = key_SH.shape[0]
    begin, end = pl.program_id(2), last_ref[...].max() // tile + 1
    place_S = begin * tile + jnp.arange(tile)

    def of_head(head, sums):
        def body(index, sums):
            places = pl.ds(index * tile, tile)
            query_QH, change_QH = (triton.load(ref.at[places, head, :]) for ref in (query_ref, change_ref))
            norm_Q, pull_Q = (triton.load(ref.at[head, places]) for ref in (norm_ref, pull_ref))
            seen_QS = _seen(index * tile + jnp.arange(tile), place_S, triton.load(first_ref.at[places]))
            weight_QS, product_QS = _gradients(scores, seen_QS, query_QH, key_SH, value_SH, change_QH, norm_Q, pull_Q)
            key_sum_SH = sums[0] + _product(product_QS.astype(query_QH.dtype).T, query_QH)
            return key_sum_SH, sums[1] + _product(weight_QS.astype(change_QH.dtype).T, change_QH)

        return lax.fori_loop(begin, end, body, sums)

    zero_SH = jnp.zeros(key_SH.shape, jnp.float32)
    key_sum_SH, value_sum_SH = lax.fori_loop(0, query_ref.shape[1], of_head, (zero_SH, zero_SH))
    key_out_ref[...] = key_sum_SH.astype(key_out_ref.dtype)
    value_out_ref[...] = value_sum_SH.astype(value_out_ref.dtype)
