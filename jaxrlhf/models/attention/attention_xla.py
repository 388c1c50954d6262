"""Attention of packed rows in plain XLA, one block of queries at a time.

A block reads the keys up to its own end. Half of the products of a causal row are therefore never computed, and no
array has the length of a row in two dimensions. If every layer has a window, a block skips the keys that are too far
back for all of its queries. If image tokens see later tokens of their image, a block reads all keys.

Scores of long rows exist for one tile of queries and keys at a time, forward and backward. They stay in a processor's
cache, and memory is linear in the row length.

Source of tiles: Dao 2023, FlashAttention-2 (arXiv:2307.08691), algorithms 1 and 2.
"""

import operator
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Float

from jaxrlhf.batch import Array
from jaxrlhf.models.attention.linear_attention import MixerWeights, Projected
from jaxrlhf.models.attention.mask import Heads, Mixed
from jaxrlhf.models.attention.score_mod import LOWEST, PLAIN, ScoreMod, mask_bias, pad_positions
from jaxrlhf.models.config import LinearAttention
from jaxrlhf.models.execution import ONE_DEVICE, Execution

ATTENDED = "attended"
"""Checkpoint name of outputs of attention. Rematerialization keeps them, so that no loop over tiles runs again."""

SHORTEST_BLOCK = 64
MOST_BLOCKS = 8
"""Most blocks of a row. More blocks would save less than a further eighth, and every block is compiled separately."""
LONG_ROW = 1024
"""Row width from which on attention is computed in tiles."""
TILE, SHARED_TILE = 256, 128
"""Number of queries of a tile, and number of its keys: in rows of one sequence, and in rows that share prompts, where
smaller tiles skip more keys of other sequences."""


def attend_blocks(
    query_RWNH: Array,
    key_RWKH: Array,
    value_RWKU: Array,
    segment_RW: Array,
    score_mod: ScoreMod = PLAIN,
    image_RW: Array | None = None,
) -> Array:
    """Compute attention of packed rows, with the arguments of `attention.attend`; values may have a different width."""
    rows, width, heads, head_dim = query_RWNH.shape
    kv_heads = key_RWKH.shape[2]
    query_RWKGH = score_mod.divided(query_RWNH).reshape(rows, width, kv_heads, -1, head_dim)
    places = _Places(segment_RW, image_RS=image_RW)
    if width >= LONG_ROW:
        mixed_RWKGU = _attend_tiles(query_RWKGH, key_RWKH, value_RWKU, places, score_mod, tile=TILE)
        return mixed_RWKGU.reshape(rows, width, heads, -1)
    query_RKGWH = jnp.transpose(query_RWKGH, (0, 2, 3, 1, 4))
    # Both products then stream through contiguous memory.
    key_RKHW, value_RKWU = jnp.transpose(key_RWKH, (0, 2, 3, 1)), jnp.transpose(value_RWKU, (0, 2, 1, 3))
    places, mixed = places.numbered(), []
    for start, end in _blocks(width):
        first = 0 if score_mod.window is None or score_mod.slides is not None else max(0, start - score_mod.window + 1)
        last = end if image_RW is None else width
        mixed.append(
            _block(
                query_RKGWH[:, :, :, start:end],
                key_RKHW[..., first:last],
                value_RKWU[:, :, first:last],
                jax.tree.map(operator.itemgetter((..., slice(start, end))), places),
                jax.tree.map(operator.itemgetter((..., slice(first, last))), places),
                score_mod,
            )
        )
    mixed_RWKGU = jnp.transpose(jnp.concatenate(mixed, axis=3), (0, 3, 1, 2, 4))
    return mixed_RWKGU.reshape(rows, width, heads, -1)


class SharedTokens(NamedTuple):
    """Packed rows in which sequences share the tokens of their prompt; shared tokens come before unshared tokens.

    Attributes:
      group_RW: int32, number of the prompt that a token belongs to, from 1; 0 is padding.
      own_RW: int32, number of the only sequence with the token, from 1; 0 is shared by all sequences of the prompt.
      position_RW: int32, position of a token in its sequences.
    """

    group_RW: Array
    own_RW: Array
    position_RW: Array

    def attend(self, heads: Heads, score_mod: ScoreMod = PLAIN, execution: Execution = ONE_DEVICE) -> Array:
        """Compute attention in the packed rows, where a shared prompt attends only once.

        A tile of scores is computed if one of its queries may see one of its keys.
        """
        query_RWNH, key_RWKH, value_RWKU, _ = heads
        rows, width, count, head_dim = query_RWNH.shape
        query_RWKGH = score_mod.divided(query_RWNH).reshape(rows, width, key_RWKH.shape[2], -1, head_dim)
        places = _Places(self.group_RW, place_RS=self.position_RW, own_RS=self.own_RW)
        mixed_RWKGU = _attend_tiles(query_RWKGH, key_RWKH, value_RWKU, places, score_mod, tile=SHARED_TILE)
        return mixed_RWKGU.reshape(rows, width, count, -1)

    def mix_states(self, linear: LinearAttention, projected: Projected, weights: MixerWeights) -> Mixed:
        """Raise `AssertionError`: a state reads each sequence whole."""
        raise AssertionError("layers with states support only whole sequences; pass a SharedPrefix")


def _blocks(width: int) -> list[tuple[int, int]]:
    """Return the first query of each block, and the index after its last query."""
    size = -(-width // min(MOST_BLOCKS, -(-width // SHORTEST_BLOCK)))
    return [(start, min(start + size, width)) for start in range(0, width, size)]


class _Places(NamedTuple):
    """Segments of queries or keys, and what else decides which of them see each other.

    Attributes:
      place_RS: Position in the sequence; None is the index in the row.
      image_RS: Number of the token's image, whose tokens see each other in both directions, or 0; None has no images.
      own_RS: Sequence of an unshared token, or 0; None shares no tokens.
    """

    segment_RS: Array
    place_RS: Any = None
    image_RS: Array | None = None
    own_RS: Array | None = None

    def numbered(self) -> "_Places":
        """Return the places of whole rows with positions."""
        place_RS = jnp.arange(self.segment_RS.shape[1])[None] if self.place_RS is None else self.place_RS
        return self._replace(place_RS=place_RS)


def _hidden(queries: _Places, keys: _Places, score_mod: ScoreMod, *, lowest: float) -> Float[Array, "R Q S"]:
    """Return the bias that hides from queries the keys that they do not see."""
    seen_RQS = queries.segment_RS[:, :, None] == keys.segment_RS[:, None, :]
    together_RQS = None
    if queries.image_RS is not None and keys.image_RS is not None:
        own_RQ1 = queries.image_RS[:, :, None]
        together_RQS = (own_RQ1 == keys.image_RS[:, None, :]) & (own_RQ1 > 0)
    if queries.own_RS is not None and keys.own_RS is not None:
        own_R1S = keys.own_RS[:, None, :]
        seen_RQS &= (own_R1S == 0) | (own_R1S == queries.own_RS[:, :, None])
    ago_RQS = queries.place_RS[:, :, None] - keys.place_RS[:, None, :]
    return mask_bias(seen_RQS & score_mod.in_window(ago_RQS, together_RQS), lowest=lowest)


def _block(
    query_RKGQH: Array, key_RKHS: Array, value_RKSU: Array, queries: _Places, keys: _Places, score_mod: ScoreMod
) -> Array:
    """Compute attention of a block of queries to the keys that it may see; softmax in float32."""
    rows, kv_heads, groups, count, head_dim = query_RKGQH.shape
    query_RKMH = query_RKGQH.reshape(rows, kv_heads, groups * count, head_dim)
    logit_RKMS = jnp.einsum("RKMH,RKHS->RKMS", query_RKMH, key_RKHS, preferred_element_type=jnp.float32)
    hidden_RMS = jnp.tile(_hidden(queries, keys, score_mod, lowest=-jnp.inf), (1, groups, 1))
    score_RKMS = score_mod.cap(logit_RKMS) + hidden_RMS[:, None]
    # Every query sees itself, so the peak is finite.
    peak_RKM1 = score_RKMS.max(axis=-1, keepdims=True)
    sink_KG = score_mod.sinks(kv_heads)
    if sink_KG is not None:
        sink_1KM1 = jnp.repeat(sink_KG, count, axis=1)[None, :, :, None]
        peak_RKM1 = jnp.maximum(peak_RKM1, sink_1KM1)
    peak_RKM1 = lax.stop_gradient(peak_RKM1)
    weight_RKMS = jnp.exp(score_RKMS - peak_RKM1)
    mixed_RKMU = jnp.einsum(
        "RKMS,RKSU->RKMU", weight_RKMS.astype(value_RKSU.dtype), value_RKSU, preferred_element_type=jnp.float32
    )
    total_RKM1 = weight_RKMS.sum(axis=-1, keepdims=True)
    if sink_KG is not None:
        total_RKM1 += jnp.exp(sink_1KM1 - peak_RKM1)
    mixed_RKMU /= total_RKM1
    return mixed_RKMU.reshape(rows, kv_heads, groups, count, -1).astype(value_RKSU.dtype)


def _attend_tiles(
    query_RWKGH: Array,
    key_RWKH: Array,
    value_RWKU: Array,
    places: _Places,
    score_mod: ScoreMod,
    *,
    tile: int,
) -> Float[Array, "R W K G U"]:
    """Compute attention of queries that are already divided, one tile of scores at a time."""
    width, kv_heads = query_RWKGH.shape[1], key_RWKH.shape[2]
    rows, places = pad_positions(((query_RWKGH, key_RWKH, value_RWKU), places), multiple=tile)
    query_RKGWH = jnp.transpose(rows[0], (0, 2, 3, 1, 4))
    key_RKWH, value_RKWU = (jnp.swapaxes(array, 1, 2) for array in rows[1:])
    scores = replace(score_mod, sink_N=None, slides=None)
    arrays = (query_RKGWH, key_RKWH, value_RKWU, score_mod.sinks(kv_heads))
    mixed_RKGWU = _flash(scores, tile, *arrays, places, score_mod.slides)
    return jnp.transpose(mixed_RKGWU, (0, 3, 1, 2, 4))[:, :width]


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _flash(scores: ScoreMod, tile: int, *arrays: Any) -> Array:
    """Compute attention in tiles, for rows whose width is a multiple of `tile`; arguments as in `_forward`."""
    return _forward(scores, tile, *arrays)[0]


def _visits(places: _Places, scores: ScoreMod, size: int) -> tuple[Array, Array, Array]:
    """Return the first query and the first key of each visited tile, visited tiles first, and the number of visits.

    A tile is visited if some query may see a key. Segments, and sequences that share a prompt, are contiguous. So the
    queries of a tile that see keys before the tile have the tile's first segment, and the first sequence of that
    segment unless a key belongs to the prompt.
    """
    segment_RW, own_RW = places.segment_RS, places.own_RS
    starts = np.arange(0, segment_RW.shape[1], size)
    query, key = (each.ravel() for each in np.meshgrid(starts, starts, indexing="ij"))
    if places.image_RS is not None:
        return jnp.asarray(query, jnp.int32), jnp.asarray(key, jnp.int32), jnp.int32(len(query))
    before = key <= query
    if scores.window is not None and scores.slides is None and own_RW is None:
        before &= query - (key + size - 1) < scores.window
    query, key = query[before], key[before]
    first_RV1, inside = segment_RW[:, query, None], key[:, None] + np.arange(size)
    if own_RW is not None:
        own_RVT, first_own_RV1 = own_RW[:, inside], own_RW[:, query, None]
        same_RVT = (segment_RW[:, inside] == first_RV1) & ((own_RVT == 0) | (own_RVT == first_own_RV1))
    else:
        same_RVT = segment_RW[:, inside[:, -1:]] == first_RV1
    seen_V = jnp.asarray(query == key) | (same_RVT & (first_RV1 > 0)).any(axis=(0, 2))
    (order_V,) = jnp.nonzero(seen_V, size=len(query), fill_value=0)
    return jnp.asarray(query, jnp.int32)[order_V], jnp.asarray(key, jnp.int32)[order_V], seen_V.sum(dtype=jnp.int32)


def _over(visits: tuple[Array, Array, Array], body: Callable[[Any, tuple[Array, Array]], Any], carry: Any) -> Any:
    """Run the body on every visited tile."""
    query_V, key_V, count = visits
    return lax.fori_loop(0, count, lambda index, carry: body(carry, (query_V[index], key_V[index])), carry)


def _tile(array: Array, start: Array, *, size: int, axis: int = -2) -> Array:
    """Slice the positions of a tile."""
    return lax.dynamic_slice_in_dim(array, start, size, axis % array.ndim)


def _queries(array_RKGWX: Array, start: Array, *, size: int) -> Float[Array, "R K M X"]:
    """Slice the positions of a tile, and flatten the query heads of a key-value head, which read the same keys."""
    tile_RKGQX = _tile(array_RKGWX, start, size=size)
    return tile_RKGQX.reshape(*tile_RKGQX.shape[:2], -1, tile_RKGQX.shape[-1])


def _renew(array: Array, tile: Array, start: Array) -> Array:
    """Replace the positions of a tile in an array."""
    tile = tile.reshape(*array.shape[:-2], -1, array.shape[-1])
    return lax.dynamic_update_slice_in_dim(array, tile, start, array.ndim - 2)


_whole = partial(jax.checkpoint, prevent_cse=False)
"""Checkpoint of a loop body as a whole. Otherwise a loop over layers would compute and keep the masks of all tiles
before it runs."""

_product = partial(jnp.einsum, preferred_element_type=jnp.float32)


def _bias(
    places: _Places, starts: tuple[Array, Array], scores: ScoreMod, groups: int, *, size: int
) -> Float[Array, "R 1 M S"]:
    """Return the mask bias of a tile's scores."""
    queries, keys = (jax.tree.map(partial(_tile, start=start, size=size, axis=-1), places) for start in starts)
    return jnp.tile(_hidden(queries, keys, scores, lowest=LOWEST), (1, groups, 1))[:, None]


def _forward(
    scores: ScoreMod,
    tile: int,
    query_RKGWH: Array,
    key_RKWH: Array,
    value_RKWU: Array,
    sink_KG: Array | None,
    given: _Places,
    slides: Array | None,
) -> tuple[Array, Any]:
    """Compute attention, and the arrays for the backward pass, such as the logarithm of each softmax's denominator.

    The arrays of `ScoreMod` are separate arguments; `scores` and `tile`, the size of a tile, are static.
    """
    rows, kv_heads, groups, width, _ = query_RKGWH.shape
    score_mod, places = replace(scores, slides=slides), given.numbered()
    slice_of, queries_of = partial(_tile, size=tile), partial(_queries, size=tile)

    @_whole
    def body(carry, starts):
        sums_RKGWU, total_RKGW1, peak_RKGW1 = carry
        query, key = starts
        key_RKSH, value_RKSU = slice_of(key_RKWH, key), slice_of(value_RKWU, key)
        score_RKMS = scores.cap(_product("RKMH,RKSH->RKMS", queries_of(query_RKGWH, query), key_RKSH))
        score_RKMS += _bias(places, starts, score_mod, groups, size=tile)
        before_RKM1 = queries_of(peak_RKGW1, query)
        peak_RKM1 = jnp.maximum(before_RKM1, score_RKMS.max(axis=-1, keepdims=True))
        weight_RKMS, kept_RKM1 = jnp.exp(score_RKMS - peak_RKM1), jnp.exp(before_RKM1 - peak_RKM1)
        mixed_RKMU = _product("RKMS,RKSU->RKMU", weight_RKMS.astype(value_RKSU.dtype), value_RKSU)
        mixed_RKMU += queries_of(sums_RKGWU, query) * kept_RKM1
        total_RKM1 = queries_of(total_RKGW1, query) * kept_RKM1 + weight_RKMS.sum(axis=-1, keepdims=True)
        renewed = (mixed_RKMU, total_RKM1, peak_RKM1)
        return tuple(_renew(array, new, query) for array, new in zip(carry, renewed, strict=True))

    zero_RKGW1 = jnp.zeros((rows, kv_heads, groups, width, 1), jnp.float32)
    total_RKGW1, peak_RKGW1 = zero_RKGW1, zero_RKGW1 + LOWEST
    if sink_KG is not None:  # the sink starts the sums, as if it had been read first
        total_RKGW1, peak_RKGW1 = zero_RKGW1 + 1, zero_RKGW1 + sink_KG[None, :, :, None, None]
    sums_RKGWU = jnp.zeros((rows, kv_heads, groups, width, value_RKWU.shape[-1]), jnp.float32)
    start = sums_RKGWU, total_RKGW1, peak_RKGW1
    sums_RKGWU, total_RKGW1, peak_RKGW1 = _over(_visits(given, score_mod, tile), body, start)
    mixed_RKGWU = checkpoint_name((sums_RKGWU / total_RKGW1).astype(value_RKWU.dtype), ATTENDED)
    log_sum_RKGW1 = checkpoint_name(peak_RKGW1 + jnp.log(total_RKGW1), ATTENDED)
    arrays = (query_RKGWH, key_RKWH, value_RKWU, sink_KG)
    return mixed_RKGWU, (*arrays, given, slides, mixed_RKGWU, log_sum_RKGW1)


def _backward(scores: ScoreMod, tile: int, kept: Any, by_mixed_RKGWU: Array) -> tuple[Any, ...]:
    """Compute the gradients of `_flash` with respect to queries, keys, values and sinks."""
    *arrays, sink_KG, given, slides, mixed_RKGWU, log_sum_RKGW1 = kept
    query_RKGWH, key_RKWH, value_RKWU = arrays
    score_mod = replace(scores, slides=slides)
    places, groups = given.numbered(), query_RKGWH.shape[2]
    slice_of, queries_of = partial(_tile, size=tile), partial(_queries, size=tile)
    # The gradient of softmax subtracts from the weights' gradients their mean under the weights.
    mean_RKGW1 = (by_mixed_RKGWU.astype(jnp.float32) * mixed_RKGWU.astype(jnp.float32)).sum(axis=-1, keepdims=True)

    @_whole
    def body(carry, starts):
        by_query_RKGWH, by_key_RKWH, by_value_RKWU = carry
        query, key = starts
        query_RKMH, by_mixed_RKMU = queries_of(query_RKGWH, query), queries_of(by_mixed_RKGWU, query)
        key_RKSH, value_RKSU = slice_of(key_RKWH, key), slice_of(value_RKWU, key)
        score_RKMS, uncapped = jax.vjp(scores.cap, _product("RKMH,RKSH->RKMS", query_RKMH, key_RKSH))
        score_RKMS += _bias(places, starts, score_mod, groups, size=tile)
        weight_RKMS = jnp.exp(score_RKMS - queries_of(log_sum_RKGW1, query))
        by_weight_RKMS = _product("RKMU,RKSU->RKMS", by_mixed_RKMU, value_RKSU)
        (by_logit_RKMS,) = uncapped(weight_RKMS * (by_weight_RKMS - queries_of(mean_RKGW1, query)))
        weight_RKMS, by_logit_RKMS = (each.astype(value_RKSU.dtype) for each in (weight_RKMS, by_logit_RKMS))
        by_query_RKMH = queries_of(by_query_RKGWH, query) + _product("RKMS,RKSH->RKMH", by_logit_RKMS, key_RKSH)
        by_key_RKSH = slice_of(by_key_RKWH, key) + _product("RKMS,RKMH->RKSH", by_logit_RKMS, query_RKMH)
        by_value_RKSU = slice_of(by_value_RKWU, key) + _product("RKMS,RKMU->RKSU", weight_RKMS, by_mixed_RKMU)
        return (
            _renew(by_query_RKGWH, by_query_RKMH, query),
            _renew(by_key_RKWH, by_key_RKSH, key),
            _renew(by_value_RKWU, by_value_RKSU, key),
        )

    zeros = tuple(jnp.zeros(array.shape, jnp.float32) for array in arrays)
    found = _over(_visits(given, score_mod, tile), body, zeros)
    by_arrays = (gradient.astype(array.dtype) for gradient, array in zip(found, arrays, strict=True))
    by_sink_KG = None
    if sink_KG is not None:
        weight_RKGW1 = jnp.exp(sink_KG[None, :, :, None, None] - log_sum_RKGW1)
        by_sink_KG = -(weight_RKGW1 * mean_RKGW1).sum(axis=(0, 3, 4))
    return *by_arrays, by_sink_KG, None, None


_flash.defvjp(_forward, _backward)
