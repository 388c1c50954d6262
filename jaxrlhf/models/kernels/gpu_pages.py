"""Decode-attention kernels for GPUs over a cache in pages, in the signature of `attend_pages`."""

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
from jaxrlhf.models.kernels.gpu import BLOCK, decode_parts, part_of, whole_width

SHARED_FROM = 2048
"""Fewest positions of a shared prompt that are read once for several responses; shorter prompts stay in the GPU's
hardware cache."""

_MOST_NUMBERS = 128 * 128
"""Most numbers (rows times head width) of the queries in a tile that reads a shared prompt: registers hold no more
next to their sums."""


def pallas_pages(
    query_BNH: Float[Array, "B N H"],
    pages_ZSJH: Float[Array, "Z S J H"],
    table_BQ: Int[Array, "B Q"],
    newest_B: Int[Array, "B"],
    score_mod: ScoreMod = PLAIN,
    *,
    interpret: bool = False,
) -> Float[Array, "B N H"]:
    """Compute attention by Flash-Decoding from pages: a tile gathers its positions from the pages that store them.

    Responses to one prompt share the pages of the prompt. If slots are long, these pages are read once for a bundle of
    responses, whose queries form one tile. Each slot reads the rest by itself, and both results are merged like other
    parts. The paged kernel of JAX has no windows, and multiplies float32 in TF32.

    Source: Juravsky et al. 2024 (Hydragen, arXiv:2402.05099), section 3.
    """
    slots, heads, head_dim = query_BNH.shape
    _, page_tokens, both, _ = pages_ZSJH.shape
    columns, wide, group = table_BQ.shape[1], whole_width(head_dim), 2 * heads // both
    capacity, most = columns * page_tokens, _MOST_NUMBERS // (wide * pl.next_power_of_2(group))
    sizes: Any = {"kv_heads": both // 2, "part": part_of(capacity), "parts": pl.cdiv(capacity, part_of(capacity))}
    sizes |= {"interpret": interpret}
    first_B, end_B = seen(newest_B, score_mod)
    sinks = sinks_part(score_mod, both // 2)
    if capacity < SHARED_FROM or min(slots, most) < 2:
        own = _own(query_BNH, pages_ZSJH, table_BQ, first_B, end_B, score_mod, **sizes)
        return joined([own, *sinks], like=query_BNH)
    # Sort slots by their first page, so that slots with a shared prompt are adjacent.
    order_B = jnp.argsort(table_BQ[:, 0])
    query_BNH, table_BQ, first_B, end_B = (leaf[order_B] for leaf in (query_BNH, table_BQ, first_B, end_B))
    bundles = _bundles(table_BQ, most=min(slots, most), page_tokens=page_tokens)
    shared = _shared(query_BNH, pages_ZSJH, table_BQ, first_B, end_B, bundles, score_mod, most=most, **sizes)
    first_B = jnp.maximum(first_B, bundles[2][bundles[3]])
    own = _own(query_BNH, pages_ZSJH, table_BQ, first_B, end_B, score_mod, **sizes)
    return joined([shared, own, *sinks], like=query_BNH)[jnp.argsort(order_B)]


def _own(query_BNH, pages_ZSJH, table_BQ, first_B, end_B, score_mod: ScoreMod, **sizes: Any) -> Parts:
    """Compute the parts of each slot by itself, over its entries from `first_B` on."""
    pages, page_tokens, _, _ = pages_ZSJH.shape
    columns, wide = table_BQ.shape[1], whole_width(query_BNH.shape[-1])
    specs = [
        pl.BlockSpec((None, columns), lambda b, k, p: (b, 0)),
        pl.BlockSpec((pages, page_tokens, None, wide), lambda b, k, p: (0, 0, 2 * k, 0)),
        pl.BlockSpec((pages, page_tokens, None, wide), lambda b, k, p: (0, 0, 2 * k + 1, 0)),
    ]
    cached = table_BQ, pages_ZSJH, pages_ZSJH
    return decode_parts(_read_pages, cached, specs, query_BNH, first_B, end_B, score_mod, **sizes)


def _read_pages(table_ref, key_ref, value_ref, start, seen_S, there_H):
    """Load the keys and values of a tile's positions from the pages of the slot."""
    place_S = start + jnp.arange(BLOCK)
    page_S = triton.load(table_ref.at[place_S // key_ref.shape[1]], mask=seen_S, other=0)
    return _gathered(key_ref, value_ref, page_S, place_S, seen_S, there_H)


def _gathered(key_ref, value_ref, page_S, place_S, seen_S, there_H):
    """Load the keys and values of positions, each from its page."""
    at_S, across_H = place_S % key_ref.shape[1], jnp.arange(key_ref.shape[2])
    entries_HS = page_S[None, :], at_S[None, :], across_H[:, None]
    entries_SH = page_S[:, None], at_S[:, None], across_H[None, :]
    key_HS = triton.load(key_ref.at[entries_HS], mask=there_H[:, None] & seen_S[None, :], other=0.0)
    return key_HS, triton.load(value_ref.at[entries_SH], mask=seen_S[:, None] & there_H[None, :], other=0.0)


def _bundles(table_BQ: Array, *, most: int, page_tokens: int) -> tuple[Array, Array, Array, Array]:
    """Group adjacent slots whose page tables begin with the same pages into bundles of at most `most` slots.

    There are as many bundles as slots; unused bundles have no slots. A bundle of one slot shares nothing, and neither
    does a bundle with fewer than `SHARED_FROM` common positions. So the summation order of a response to a short
    prompt does not depend on the other slots.

    Returns:
      First slot, number of slots and number of shared positions of each bundle, and the bundle of each slot.
    """
    slots, columns = table_BQ.shape
    place_B = jnp.arange(slots)
    differs_B = jnp.concatenate([jnp.ones(1, bool), table_BQ[1:, 0] != table_BQ[:-1, 0]])
    begins_B = (place_B - lax.cummax(jnp.where(differs_B, place_B, 0))) % most == 0
    bundle_B = jnp.cumsum(begins_B) - 1
    first_X = jnp.nonzero(begins_B, size=slots, fill_value=slots)[0]
    count_X = jnp.append(first_X[1:], slots) - first_X
    alike_BQ = table_BQ == table_BQ[first_X[bundle_B]]
    alike_B = jnp.where(alike_BQ, columns, jnp.arange(columns)[None]).min(axis=1)
    alike_X = jax.ops.segment_min(alike_B, bundle_B, num_segments=slots, indices_are_sorted=True)
    shared_X = jnp.where((count_X > 1) & (alike_X * page_tokens >= SHARED_FROM), alike_X * page_tokens, 0)
    return first_X.astype(jnp.int32), count_X.astype(jnp.int32), shared_X.astype(jnp.int32), bundle_B


def _shared(
    query_BNH,
    pages_ZSJH,
    table_BQ,
    first_B,
    end_B,
    bundles: tuple[Array, Array, Array, Array],
    score_mod: ScoreMod,
    *,
    kv_heads: int,
    part: int,
    parts: int,
    most: int,
    interpret: bool,
) -> Parts:
    """Compute the attention of bundles to the positions that their slots share; each query of a slot is a row (R)."""
    slots, heads, head_dim = query_BNH.shape
    pages, page_tokens, _, _ = pages_ZSJH.shape
    group, wide = heads // kv_heads, whole_width(head_dim)
    tile = pl.next_power_of_2(most * group)
    # The rows of a bundle are one tile, which may extend beyond the last row.
    rows = slots * group + tile
    query_KRH = jnp.swapaxes(query_BNH.reshape(slots, kv_heads, group, head_dim), 0, 1)
    query_KRH = query_KRH.reshape(kv_heads, slots * group, head_dim)
    query_KRH = jnp.pad(query_KRH, ((0, 0), (0, tile), (0, wide - head_dim)))
    first_R, end_R = (jnp.pad(jnp.repeat(leaf_B, group), (0, tile)) for leaf_B in (first_B, end_B))

    whole = (kv_heads, parts, rows)
    of_bundle, of_rows = pl.BlockSpec((None,), lambda x, k, p: (x,)), pl.BlockSpec((rows,), lambda x, k, p: (0,))
    of_heads = pl.BlockSpec((None, None, rows), lambda x, k, p: (k, p, 0))
    out_KPRH, sum_KPR, most_KPR = pl.pallas_call(
        partial(
            _shared_part,
            part=part,
            group=group,
            tile=tile,
            head_dim=head_dim,
            divisor=score_mod.divide_by(head_dim),
            cap=score_mod.cap,
        ),
        grid=(slots, kv_heads, parts),
        in_specs=[
            *[of_bundle] * 3,
            *[of_rows] * 2,
            pl.BlockSpec((None, rows, wide), lambda x, k, p: (k, 0, 0)),
            pl.BlockSpec(table_BQ.shape, lambda x, k, p: (0, 0)),
            pl.BlockSpec((pages, page_tokens, None, wide), lambda x, k, p: (0, 0, 2 * k, 0)),
            pl.BlockSpec((pages, page_tokens, None, wide), lambda x, k, p: (0, 0, 2 * k + 1, 0)),
        ],
        out_specs=[pl.BlockSpec((None, None, rows, wide), lambda x, k, p: (k, p, 0, 0)), *[of_heads] * 2],
        out_shape=[jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((*whole, wide), whole, whole)],
        compiler_params=triton.CompilerParams(num_warps=8 if tile * wide >= _MOST_NUMBERS else 4, num_stages=2),
        interpret=interpret,
        name="decode_shared_prompt",
    )(*bundles[:3], first_R, end_R, query_KRH, table_BQ, pages_ZSJH, pages_ZSJH)

    def by_slot(leaf: Array) -> Array:
        leaf = leaf[:, :, : slots * group].reshape(kv_heads, parts, slots, group, *leaf.shape[3:])
        return jnp.moveaxis(leaf, 2, 0)

    return Parts(by_slot(out_KPRH), by_slot(sum_KPR), by_slot(most_KPR))


def _shared_part(
    bundle_ref,
    count_ref,
    shared_ref,
    first_ref,
    end_ref,
    query_ref,
    table_ref,
    key_ref,
    value_ref,
    out_ref,
    sum_ref,
    most_ref,
    *,
    part,
    group,
    tile,
    head_dim,
    divisor,
    cap,
):
    """Compute the softmax of a bundle's queries of one key-value head over one part of the shared positions."""
    precision = lax.Precision.HIGHEST if query_ref.dtype == jnp.float32 else None
    slot, shared = bundle_ref[...], shared_ref[...]
    own_M = jnp.arange(tile) < count_ref[...] * group
    row_M = slot * group + jnp.arange(tile)
    across_H = jnp.arange(query_ref.shape[-1])
    there_H = across_H < head_dim
    query_MH = triton.load(query_ref.at[row_M[:, None], across_H[None, :]], mask=own_M[:, None], other=0.0)
    first_M = triton.load(first_ref.at[row_M], mask=own_M, other=2**30)
    end_M = jnp.minimum(triton.load(end_ref.at[row_M], mask=own_M, other=0), shared)
    first, end, begin = first_M.min(), end_M.max(), pl.program_id(2) * part

    def body(index, carry):
        out_MH, sum_M, most_M = carry
        place_S = begin + index * BLOCK + jnp.arange(BLOCK)
        there_S = (place_S >= first) & (place_S < end)
        # An empty bundle has a slot number beyond the last slot; its mask prevents the read.
        page_S = triton.load(table_ref.at[slot, place_S // key_ref.shape[1]], mask=there_S, other=0)
        key_HS, value_SH = _gathered(key_ref, value_ref, page_S, place_S, there_S, there_H)
        score_MS = cap(triton.dot(query_MH, key_HS, precision=precision) / divisor)
        seen_MS = (place_S[None, :] >= first_M[:, None]) & (place_S[None, :] < end_M[:, None])
        score_MS = jnp.where(seen_MS, score_MS, LOWEST)
        next_M = jnp.maximum(most_M, score_MS.max(axis=1))
        # A row that sees no position of the tile gets zero weights, even if other rows see some.
        kept_M, weight_MS = jnp.exp(most_M - next_M), jnp.where(seen_MS, jnp.exp(score_MS - next_M[:, None]), 0.0)
        new_MH = triton.dot(weight_MS.astype(value_SH.dtype), value_SH, precision=precision)
        return kept_M[:, None] * out_MH + new_MH, kept_M * sum_M + weight_MS.sum(axis=1), next_M

    zero_M = jnp.zeros(tile, jnp.float32)
    start_state = jnp.zeros((tile, query_MH.shape[1]), jnp.float32), zero_M, zero_M + LOWEST
    blocks = jnp.clip(first - begin, 0, part) // BLOCK, pl.cdiv(jnp.clip(end - begin, 0, part), BLOCK)
    out_MH, sum_M, most_M = lax.fori_loop(*blocks, body, start_state)
    triton.store(out_ref.at[row_M[:, None], across_H[None, :]], out_MH, mask=own_M[:, None])
    triton.store(sum_ref.at[row_M], sum_M, mask=own_M)
    triton.store(most_ref.at[row_M], most_M, mask=own_M)
