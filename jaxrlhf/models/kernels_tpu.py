"""Attention kernels of TPUs, in the signature of `attend`.

Each computes on the arrays of one device. `kernel_choice` decides whether it is used.

Decoding has none: the paged kernels that JAX ships want head width last and both keys and values
in pages, a copy of the cache at every token.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu import splash_attention as splash
from jaxtyping import Float, Int

from jaxrlhf.batch import Array
from jaxrlhf.models.attention import widen
from jaxrlhf.models.scores import PLAIN, Scores

_LANES = 128
"""Width of a register; splash attention takes rows and heads that are multiples of it."""

_LARGEST_BLOCK = 512
"""Positions of a tile. Larger ones read keys less often and skip less above the diagonal."""


def splash_rows(
    query_RWNH: Float[Array, "R W N H"],
    key_RWKH: Float[Array, "R W K H"],
    value_RWKH: Float[Array, "R W K H"],
    segment_RW: Int[Array, "R W"],
    scores: Scores = PLAIN,
    *,
    interpret: bool = False,
) -> Float[Array, "R W N H"]:
    """Splash attention: flash attention that skips the tiles above the diagonal and before the window.

    Rows and heads are padded to multiples of 128. Queries are scaled before the product, in their own dtype.
    """
    _, width, heads, head_dim = query_RWNH.shape
    query, key, value, segment = widen((query_RWNH, key_RWKH, value_RWKH, segment_RW), multiple=_LANES)
    padded = segment.shape[1]

    def head_major(array: Array) -> Array:
        more = -head_dim % _LANES
        return jnp.pad(jnp.swapaxes(array, 1, 2), ((0, 0), (0, 0), (0, 0), (0, more)))

    def run(mask: splash.Mask) -> Callable[..., Array]:
        kernel = splash.make_splash_mha(
            splash.MultiHeadMask([mask] * heads),
            block_sizes=_tiles(math.gcd(padded, _LARGEST_BLOCK)),
            head_shards=1,
            q_seq_shards=1,
            attn_logits_soft_cap=scores.soft_cap,
            interpret=interpret,
        )
        return jax.vmap(lambda *row: kernel(*row[:3], segment_ids=splash.SegmentIds(row[3], row[3])))

    shape = padded, padded
    arrays = head_major(query / scores.divide_by(head_dim)), head_major(key), head_major(value), segment
    everything = splash.CausalMask(shape)
    near = everything if scores.window is None else splash.LocalMask(shape, (scores.window - 1, 0), 0)
    if scores.window is None or scores.slides is None:
        out_RNWH = run(near)(*arrays)
    else:
        # Masks are compiled in, so that a layer chooses between two kernels.
        out_RNWH = jax.lax.cond(scores.slides, run(near), run(everything), *arrays)
    return jnp.swapaxes(out_RNWH, 1, 2)[:, :width, :, :head_dim]


def _tiles(size: int) -> splash.BlockSizes:
    return splash.BlockSizes(
        block_q=size,
        block_kv=size,
        block_q_dkv=size,
        block_kv_dkv=size,
        block_q_dq=size,
        block_kv_dq=size,
    )
