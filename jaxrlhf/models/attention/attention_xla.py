"""Attention of packed rows in plain XLA, a block of queries at a time.

A block reads the keys up to its own end, so half of the products of a causal row are never
computed, and no array is as long as a row in both directions. Blocks of long rows go through their
queries a strip at a time, so that scores and masks take memory that is linear in the row. Where every
layer has a window, a block reads none of the keys that are too far back for all of its queries. Where
tokens of an image see those behind them, a block reads all keys.
"""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp

from jaxrlhf.batch import Array
from jaxrlhf.models.attention.score_mod import PLAIN, ScoreMod, mask_bias

_SHORTEST_BLOCK = 64
MOST_BLOCKS = 8
"""More would save less than a further eighth, and every block is compiled by itself."""
LONG_ROW = 1024
"""Width from which on the backward pass computes a block's softmax again instead of keeping it."""
STRIP = 256
"""Most queries of a block whose scores exist at a time."""


def attend_blocks(
    query_RWNH: Array, key_RWKH: Array, value_RWKH: Array, segment_RW: Array, score_mod: ScoreMod = PLAIN
) -> Array:
    """Attention of packed rows, with the arguments of `attention.attend`; values may have a width of their own."""
    rows, width, heads, head_dim = query_RWNH.shape
    kv_heads = key_RWKH.shape[2]
    query_RWKGH = score_mod.divided(query_RWNH).reshape(rows, width, kv_heads, -1, head_dim)
    query_RKGWH = jnp.transpose(query_RWKGH, (0, 2, 3, 1, 4))
    # Both products then stream through contiguous memory.
    key_RKHW, value_RKWH = jnp.transpose(key_RWKH, (0, 2, 3, 1)), jnp.transpose(value_RWKH, (0, 2, 1, 3))
    mixed = []
    for start, end in _blocks(width):
        first = 0 if score_mod.window is None or score_mod.slides is not None else max(0, start - score_mod.window + 1)
        last = end if score_mod.block_RW is None else width
        strips = partial(_strips, start=start - first)
        block_RS = None if score_mod.block_RW is None else score_mod.block_RW[:, first:last]
        compute = jax.checkpoint(strips) if width >= LONG_ROW else strips
        mixed.append(
            compute(
                query_RKGWH[:, :, :, start:end],
                key_RKHW[..., first:last],
                value_RKWH[:, :, first:last],
                segment_RW[:, first:last],
                replace(score_mod, block_RW=block_RS),
            )
        )
    mixed_RWKGH = jnp.transpose(jnp.concatenate(mixed, axis=3), (0, 3, 1, 2, 4))
    return mixed_RWKGH.reshape(rows, width, heads, -1)


def _blocks(width: int) -> list[tuple[int, int]]:
    """First query of each block, and the one after its last."""
    size = -(-width // min(MOST_BLOCKS, -(-width // _SHORTEST_BLOCK)))
    return [(start, min(start + size, width)) for start in range(0, width, size)]


def _strips(
    query_RKGQH: Array, key_RKHS: Array, value_RKSH: Array, segment_RS: Array, score_mod: ScoreMod, *, start: int
) -> Array:
    """A block: its queries from `start` on over the keys that they are given, a strip after another if it is long."""
    queries = query_RKGQH.shape[3]
    if queries <= STRIP:
        return _strip(query_RKGQH, key_RKHS, value_RKSH, segment_RS, score_mod, jnp.int32(start))
    count = -(-queries // STRIP)
    size = -(-queries // count)
    # Queries that fill up the last strip are zeros in the place of others, and are cut off.
    padded_RKGQH = jnp.pad(query_RKGQH, ((0, 0), (0, 0), (0, 0), (0, count * size - queries), (0, 0)))
    strip_CRKGQH = jnp.moveaxis(padded_RKGQH.reshape(*padded_RKGQH.shape[:3], count, size, -1), 3, 0)

    @jax.checkpoint
    def strip(strip_RKGQH: Array, at: Array) -> Array:
        return _strip(strip_RKGQH, key_RKHS, value_RKSH, segment_RS, score_mod, at)

    mixed_CRKGQH = jax.lax.map(lambda given: strip(*given), (strip_CRKGQH, start + size * jnp.arange(count)))
    mixed_RKGCQH = jnp.moveaxis(mixed_CRKGQH, 0, 3)
    return mixed_RKGCQH.reshape(*padded_RKGQH.shape[:4], -1)[:, :, :, :queries]


def _strip(
    query_RKGQH: Array, key_RKHS: Array, value_RKSH: Array, segment_RS: Array, score_mod: ScoreMod, start: Array
) -> Array:
    """Queries from `start` on over the keys that they are given; softmax in float32."""
    rows, kv_heads, groups, queries, head_dim = query_RKGQH.shape
    keys = key_RKHS.shape[-1]
    place_Q = jnp.minimum(start + jnp.arange(queries), keys - 1)
    query_RKMH = query_RKGQH.reshape(rows, kv_heads, groups * queries, head_dim)
    logit_RKMS = jnp.einsum("RKMH,RKHS->RKMS", query_RKMH, key_RKHS, preferred_element_type=jnp.float32)
    seen_RQS = jnp.take(segment_RS, place_Q, axis=1)[:, :, None] == segment_RS[:, None, :]
    ago_1QS = (place_Q[:, None] - jnp.arange(keys)[None, :])[None]
    together_RQS, block_RS = None, score_mod.block_RW
    if block_RS is not None:
        own_RQ1 = jnp.take(block_RS, place_Q, axis=1)[:, :, None]
        together_RQS = (own_RQ1 == block_RS[:, None, :]) & (own_RQ1 > 0)
    seen_RQS &= score_mod.in_window(ago_1QS, together_RQS)
    hidden_RMS = jnp.tile(mask_bias(seen_RQS), (1, groups, 1))
    score_RKMS = score_mod.cap(logit_RKMS) + hidden_RMS[:, None]
    # Every query sees itself, so the peak is finite.
    peak_RKM1 = score_RKMS.max(axis=-1, keepdims=True)
    sink_KG = score_mod.sinks(kv_heads)
    if sink_KG is not None:
        sink_1KM1 = jnp.repeat(sink_KG, queries, axis=1)[None, :, :, None]
        peak_RKM1 = jnp.maximum(peak_RKM1, sink_1KM1)
    peak_RKM1 = jax.lax.stop_gradient(peak_RKM1)
    weight_RKMS = jnp.exp(score_RKMS - peak_RKM1)
    mixed_RKMH = jnp.einsum(
        "RKMS,RKSH->RKMH", weight_RKMS.astype(value_RKSH.dtype), value_RKSH, preferred_element_type=jnp.float32
    )
    total_RKM1 = weight_RKMS.sum(axis=-1, keepdims=True)
    if sink_KG is not None:
        total_RKM1 += jnp.exp(sink_1KM1 - peak_RKM1)
    mixed_RKMH /= total_RKM1
    mixed_RKGQH = mixed_RKMH.reshape(rows, kv_heads, groups, queries, -1)
    return mixed_RKGQH.astype(value_RKSH.dtype)
