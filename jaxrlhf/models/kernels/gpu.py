"""Decode-attention kernel for GPUs, in the signature of `attend_cache`, and code shared with the kernel for pages."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Float, Int

from jaxrlhf.batch import Array
from jaxrlhf.models.attention.score_mod import LOWEST, PLAIN, ScoreMod
from jaxrlhf.models.attention.softmax_parts import Parts, joined, seen, sinks_part

BLOCK, _SMALLEST_PART = 64, 512
"""Cache positions of a tile, and fewest cache positions of one program of a kernel."""

_MOST_PARTS = 32
"""Most parts of a slot. Each part has a float32 output, which is written and read once more."""

_SMALLEST_DOT = 16
"""Fewest rows that the tensor cores multiply, and fewest numbers that they sum over."""


def pallas_decode(
    query_BNH: Float[Array, "B N H"],
    key_BKHS: Float[Array, "B K H S"],
    value_BKSH: Float[Array, "B K S H"],
    position_B: Int[Array, "B"],
    score_mod: ScoreMod = PLAIN,
    *,
    ring: bool = False,
    interpret: bool = False,
) -> Float[Array, "B N H"]:
    """Compute attention by Flash-Decoding on GPU, reading only the visible part of each slot's cache in memory order.

    The cache is split along its positions. The parts are merged by their largest scores and their sums of weights.
    """
    capacity = key_BKHS.shape[3]
    first_B, end_B = seen(position_B if ring else jnp.minimum(position_B, capacity - 1), score_mod)
    if ring:  # the visible range may wrap around the end of the ring
        first_B, end_B = first_B % capacity, first_B % capacity + end_B - first_B
    entries = capacity if ring else None
    arrays = query_BNH, key_BKHS, value_BKSH, first_B, end_B, score_mod
    own = pallas_parts(*arrays, entries=entries, interpret=interpret)
    return joined([own, *sinks_part(score_mod, key_BKHS.shape[1])], like=query_BNH)


def pallas_parts(
    query_BNH: Float[Array, "B N H"],
    key_BKHS: Float[Array, "B K H S"],
    value_BKSH: Float[Array, "B K S H"],
    first_B: Int[Array, "B"],
    end_B: Int[Array, "B"],
    score_mod: ScoreMod = PLAIN,
    *,
    entries: int | None = None,
    interpret: bool = False,
) -> Parts:
    """Compute the softmax of one query per slot over cache entries in [`first_B`, `end_B`), part by part.

    Args:
      entries: Number of entries of a ring, as in `decode_parts`; None is no ring.
    """
    _, kv_heads, head_dim, capacity = key_BKHS.shape
    wide, part = whole_width(head_dim), part_of(capacity)
    specs = [
        pl.BlockSpec((None, None, wide, part), lambda b, k, p: (b, k, 0, p)),
        pl.BlockSpec((None, None, part, wide), lambda b, k, p: (b, k, p, 0)),
    ]
    sizes: Any = {"kv_heads": kv_heads, "part": part, "parts": pl.cdiv(capacity, part)}
    arrays = (key_BKHS, value_BKSH), specs, query_BNH, first_B, end_B
    return decode_parts(_read_slot, *arrays, score_mod, **sizes, entries=entries, interpret=interpret)


def part_of(capacity: int) -> int:
    """Return the number of cache positions of one program."""
    return max(_SMALLEST_PART, pl.next_power_of_2(pl.cdiv(capacity, _MOST_PARTS)))


def whole_width(head_dim: int) -> int:
    """Return the width of a head in a tile, a power of two; numbers beyond the head's own width are read as zeros."""
    return max(_SMALLEST_DOT, pl.next_power_of_2(head_dim))


def _read_slot(key_ref, value_ref, start, seen_S, there_H):
    """Load the keys and values of a tile's positions, from the part of the slot that this program reads."""
    window = pl.ds(start % key_ref.shape[1], BLOCK)
    key_HS = triton.load(key_ref.at[:, window], mask=there_H[:, None] & seen_S[None, :], other=0.0)
    return key_HS, triton.load(value_ref.at[window, :], mask=seen_S[:, None] & there_H[None, :], other=0.0)


def decode_parts(
    read: Callable,
    cached: tuple,
    specs: list,
    query_BNH,
    first_B,
    end_B,
    score_mod: ScoreMod,
    *,
    kv_heads: int,
    part: int,
    parts: int,
    interpret: bool,
    entries: int | None = None,
) -> Parts:
    """Compute the attention of slots to their cache, part by part; `read` loads keys and values of cache positions.

    Args:
      entries: Number of entries of a ring, in which an end past the last entry wraps to the first; None is no ring.
    """
    slots, _, head_dim = query_BNH.shape
    query_BKGH = query_BNH.reshape(slots, kv_heads, -1, head_dim)
    group, wide = query_BKGH.shape[2], whole_width(head_dim)
    query_BKGH = jnp.pad(query_BKGH, ((0, 0), (0, 0), (0, 0), (0, wide - head_dim)))
    tile = max(_SMALLEST_DOT, pl.next_power_of_2(group))
    whole = (slots, kv_heads, parts, group)
    of_slot = pl.BlockSpec((None,), lambda b, k, p: (b,))
    of_heads = pl.BlockSpec((None, None, None, tile), lambda b, k, p: (b, k, p, 0))
    found = pl.pallas_call(
        partial(
            _decode_part,
            read=read,
            part=part,
            entries=entries,
            group=group,
            tile=tile,
            head_dim=head_dim,
            divisor=score_mod.divide_by(head_dim),
            cap=score_mod.cap,
        ),
        grid=(slots, kv_heads, parts),
        in_specs=[
            *[of_slot] * 2,
            pl.BlockSpec((None, None, tile, wide), lambda b, k, p: (b, k, 0, 0)),
            *specs,
        ],
        out_specs=[
            pl.BlockSpec((None, None, None, tile, wide), lambda b, k, p: (b, k, p, 0, 0)),
            *[of_heads] * 2,
        ],
        out_shape=[jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((*whole, wide), whole, whole)],
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=2),
        interpret=interpret,
        name="decode_attention",
    )(first_B, end_B, query_BKGH, *cached)
    return Parts(*found)


def _decode_part(first_ref, end_ref, query_ref, *refs, read, part, entries, group, tile, head_dim, divisor, cap):
    """Compute the softmax over one part of one slot's cache, for the queries of one key-value head.

    Write the weighted values, the sum of the weights (0 in a part without visible positions) and the largest score.
    """
    *cached, out_ref, sum_ref, most_ref = refs
    precision = lax.Precision.HIGHEST if query_ref.dtype == jnp.float32 else None
    own_G1, there_H = (jnp.arange(tile) < group)[:, None], jnp.arange(query_ref.shape[-1]) < head_dim
    query_GH = triton.load(query_ref, mask=own_G1, other=0.0)
    begin = pl.program_id(2) * part
    first, end = first_ref[...], end_ref[...]

    def body(index, carry):
        out_GH, sum_G, most_G = carry
        start = begin + index * BLOCK
        place_S = start + jnp.arange(BLOCK)
        seen_S = (place_S >= first) & (place_S < end)
        if entries is not None:
            seen_S = (seen_S | (place_S < end - entries)) & (place_S < entries)
        key_HS, value_SH = read(*cached, start, seen_S, there_H)
        score_GS = cap(triton.dot(query_GH, key_HS, precision=precision) / divisor)
        score_GS = jnp.where(seen_S[None, :], score_GS, LOWEST)
        next_G = jnp.maximum(most_G, score_GS.max(axis=1))
        kept_G, weight_GS = jnp.exp(most_G - next_G), jnp.exp(score_GS - next_G[:, None])
        new_GH = triton.dot(weight_GS.astype(value_SH.dtype), value_SH, precision=precision)
        return kept_G[:, None] * out_GH + new_GH, kept_G * sum_G + weight_GS.sum(axis=1), next_G

    zero_G = jnp.zeros(tile, jnp.float32)
    start_state = jnp.zeros((tile, query_GH.shape[1]), jnp.float32), zero_G, zero_G + LOWEST
    lowest, highest = first, end
    if entries is not None:
        lowest, highest = jnp.where(end > entries, 0, first), jnp.minimum(end, entries)
    blocks = jnp.clip(lowest - begin, 0, part) // BLOCK, pl.cdiv(jnp.clip(highest - begin, 0, part), BLOCK)
    out_GH, sum_G, most_G = lax.fori_loop(*blocks, body, start_state)
    triton.store(out_ref, out_GH, mask=own_G1)
    triton.store(sum_ref, sum_G, mask=own_G1[:, 0])
    triton.store(most_ref, most_G, mask=own_G1[:, 0])
