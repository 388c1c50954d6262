"""Attention kernels for TPUs, in the signatures of `attend` and `attend_pages`."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu import splash_attention as splash
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention
from jaxtyping import Float, Int

from jaxrlhf.batch import Array
from jaxrlhf.models.attention.score_mod import PLAIN, ScoreMod, pad_positions

_LANES = 128
"""Width of a TPU register; splash attention takes rows and heads in multiples of this width."""

_BLOCK, _LONG_BLOCK = 512, 1024
"""Positions of a tile, in rows of up to 256k tokens and in longer rows. Larger tiles read keys less often and skip
less above the diagonal."""

_TILES = 2**18
"""Most tiles of a kernel, whose table is stored in the 1 MiB of scalar memory. The queries of longer rows are split
into parts, with a kernel for each part."""

_PAGES_BLOCK, _QUERIES_BLOCK = 512, 8
"""Positions that the paged kernel reads at once, and slots whose queries are computed together."""


def splash_rows(
    query_RWNH: Float[Array, "R W N H"],
    key_RWKH: Float[Array, "R W K H"],
    value_RWKH: Float[Array, "R W K H"],
    segment_RW: Int[Array, "R W"],
    score_mod: ScoreMod = PLAIN,
    *,
    interpret: bool = False,
) -> Float[Array, "R W N H"]:
    """Compute splash attention: flash attention that skips the tiles above the diagonal and before the window.

    Rows and heads are padded to multiples of 128. Queries are divided before the product, which rounds once more.
    """
    _, width, heads, head_dim = query_RWNH.shape
    query, key, value, segment = pad_positions((query_RWNH, key_RWKH, value_RWKH, segment_RW), multiple=_LANES)
    padded = segment.shape[1]
    block = math.gcd(padded, _BLOCK if padded <= _BLOCK * math.isqrt(_TILES) else _LONG_BLOCK)
    part = block * max(1, _TILES // (padded // block))

    def head_major(array: Array) -> Array:
        more = -head_dim % _LANES
        return jnp.pad(jnp.swapaxes(array, 1, 2), ((0, 0), (0, 0), (0, 0), (0, more)))

    def kernel(start: int, end: int, window: int | None) -> Callable[..., Array]:
        """Return the attention kernel of the queries from start to end."""
        before = None if window is None else window - 1
        call = splash.make_splash_mha(
            splash.MultiHeadMask([_Near((end - start, end), (before, 0), start)] * heads),
            block_sizes=_tiles(block),
            head_shards=1,
            q_seq_shards=1,
            attn_logits_soft_cap=score_mod.soft_cap,
            interpret=interpret,
        )
        return jax.vmap(lambda *row: call(*row[:3], segment_ids=splash.SegmentIds(*row[3:])))

    def run(window: int | None) -> Callable[..., Array]:
        def attend(query: Array, key: Array, value: Array, segment: Array) -> Array:
            outputs = []
            for start in range(0, padded, part):
                end = min(start + part, padded)
                keys = key[:, :, :end], value[:, :, :end]
                segments = segment[:, start:end], segment[:, :end]
                outputs.append(kernel(start, end, window)(query[:, :, start:end], *keys, *segments))
            return jnp.concatenate(outputs, axis=2)

        return attend

    arrays = head_major(score_mod.divided(query)), head_major(key), head_major(value), segment
    return jnp.swapaxes(_by_window(run, score_mod, *arrays), 1, 2)[:, :width, :, :head_dim]


def _tiles(size: int) -> splash.BlockSizes:
    return splash.BlockSizes(
        block_q=size,
        block_kv=size,
        block_q_dkv=size,
        block_kv_dkv=size,
        block_q_dq=size,
        block_kv_dq=size,
    )


class _Near(splash.LocalMask):
    """Causal mask, with or without a window, that describes a tile by its corners.

    Splash attention needs to know whether any and whether all of a tile is visible; the kernel masks partly visible
    tiles. The masks of JAX build every tile for this, which takes minutes for a row of 128k tokens.
    """

    def __getitem__(self, tile: tuple[slice, slice]) -> np.ndarray:
        """Return two values with the same `any` and `all` as the mask of the tile."""
        (first, last), (oldest, newest) = ((part.start, part.stop - 1) for part in tile)
        before = self.window_size[0]
        seen = oldest <= last + self.offset and (before is None or newest >= first + self.offset - before)
        whole = newest <= first + self.offset and (before is None or oldest >= last + self.offset - before)
        return np.array([seen, whole])


def ragged_pages(
    query_BNH: Float[Array, "B N H"],
    pages_ZSJH: Float[Array, "Z S J H"],
    table_BQ: Int[Array, "B Q"],
    newest_B: Int[Array, "B"],
    score_mod: ScoreMod = PLAIN,
) -> Float[Array, "B N H"]:
    """Compute ragged paged attention with one query per slot; head widths are multiples of 128.

    Block sizes are set here, because the kernel's own table is for prefill and decode together.
    """
    slots, _, head_dim = query_BNH.shape
    arrays = query_BNH, pages_ZSJH, newest_B + 1, table_BQ

    def run(window: int | None) -> Callable[..., Array]:
        return lambda *arrays: ragged_paged_attention(
            *arrays,
            jnp.arange(slots + 1, dtype=jnp.int32),
            jnp.array([slots], jnp.int32),
            sm_scale=1 / score_mod.divide_by(head_dim),
            sliding_window=window,
            soft_cap=score_mod.soft_cap,
            num_kv_pages_per_block=min(table_BQ.shape[1], max(1, _PAGES_BLOCK // pages_ZSJH.shape[1])),
            num_queries_per_block=_QUERIES_BLOCK,
        )

    return _by_window(run, score_mod, *arrays)


def _by_window(run: Callable[[int | None], Callable[..., Array]], score_mod: ScoreMod, *arrays: Array) -> Array:
    """Apply the kernel `run(window)`. Windows are compiled in, so an optional window selects one of two kernels."""
    if score_mod.window is None or score_mod.slides is None:
        return run(score_mod.window)(*arrays)
    return jax.lax.cond(score_mod.slides, run(score_mod.window), run(None), *arrays)
