"""Attention of packed rows to themselves, and of new tokens of each slot to its cache.

`attend`, `attend_cache` and `attend_pages` are the interface to the kernels; every kernel computes the same function.
`kernel_choice` finds the best kernels that compute correctly on a backend.
"""

import importlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Float, Int

from jaxrlhf.batch import Array
from jaxrlhf.models.attention.attention_xla import attend_blocks
from jaxrlhf.models.attention.linear_attention import MixerWeights, Projected, mix_rows
from jaxrlhf.models.attention.mask import Heads, Mixed
from jaxrlhf.models.attention.rings import seen_in_ring
from jaxrlhf.models.attention.score_mod import LOWEST, PLAIN, ScoreMod, mask_bias
from jaxrlhf.models.attention.softmax_parts import Parts, joined, of_devices, part_of, seen_of_device, sinks_part
from jaxrlhf.models.config import LinearAttention
from jaxrlhf.models.execution import ONE_DEVICE, Execution


class Segments(NamedTuple):
    """Causal mask of packed rows with one sequence in each segment.

    Attributes:
      segment_RW: int32, number of the token's segment, from 1; 0 is padding.
      image_RW: int32, number of the token's image, from 1; 0 is text. Tokens of one image see each other in both
        directions. None is causal in images too.
    """

    segment_RW: Array
    image_RW: Array | None = None

    def attend(self, heads: Heads, score_mod: ScoreMod = PLAIN, execution: Execution = ONE_DEVICE) -> Array:
        """Compute attention inside each segment; see `attend`."""
        return attend(*heads[:3], self.segment_RW, score_mod, image_RW=self.image_RW, execution=execution)

    def mix_states(self, linear: LinearAttention, projected: Projected, weights: MixerWeights) -> Mixed:
        """Compute linear attention inside each segment, and the states after each row's last token."""
        assert self.image_RW is None, "layers with states support only causal attention"
        return mix_rows(linear, projected, weights, self.segment_RW, self.segment_RW > 0)


def attend(
    query_RWNH: Float[Array, "R W N H"],
    key_RWKH: Float[Array, "R W K H"],
    value_RWKU: Float[Array, "R W K U"],
    segment_RW: Int[Array, "R W"],
    score_mod: ScoreMod = PLAIN,
    *,
    image_RW: Int[Array, "R W"] | None = None,
    execution: Execution = ONE_DEVICE,
) -> Float[Array, "R W N U"]:
    """Compute causal attention inside each segment of a row; softmax in float32.

        out_t = sum_s softmax_s(q_t . k_s / sqrt(H)) v_s    over s <= t with segment_s = segment_t

    or with other scores, and inside a window (`ScoreMod`). Padding is segment 0 and sees only padding, so no row of
    the softmax is empty. The tokens of a segment are contiguous, so windows count in the segment's own positions.

    Args:
      image_RW: See `Segments`; only the `xla` kernel supports images.
    """
    if execution.rows_kernel == "xla":
        return attend_blocks(query_RWNH, key_RWKH, value_RWKU, segment_RW, score_mod, image_RW)
    assert image_RW is None, "kernels support only causal attention"
    # Kernels support only one width for queries, keys and values.
    value_dim = value_RWKU.shape[-1]
    padding = query_RWNH.shape[-1] - value_dim
    value_RWKU = jnp.pad(value_RWKU, ((0, 0), (0, 0), (0, 0), (0, padding)))
    row = PartitionSpec(execution.row_axes)
    head = PartitionSpec(execution.row_axes, None, execution.head_axes)
    kernel = _on_devices(ROWS[execution.rows_kernel], (head, head, head, row), head, execution)
    return kernel(query_RWNH, key_RWKH, value_RWKU, segment_RW, score_mod)[..., :value_dim]


def attend_cache(
    query_BNH: Float[Array, "B N H"],
    key_BKHS: Float[Array, "B K H S"],
    value_BKSH: Float[Array, "B K S H"],
    position_B: Int[Array, "B"],
    score_mod: ScoreMod = PLAIN,
    *,
    ring: bool = False,
    execution: Execution = ONE_DEVICE,
) -> Float[Array, "B N H"]:
    """Attend with one query per slot to its cache entries at index <= position, inside the window; softmax in float32.

    Keys have positions last and values have the head width last, so both products stream through contiguous memory.

    If devices share the positions of a slot, each device attends to its own positions, and one gather combines the
    results.

    Args:
      ring: True if position p is in entry p mod S. The cache then holds only the newest S positions, on every device.
    """
    if execution.cache_ways > 1 and not ring:
        return _attend_shared(query_BNH, key_BKHS, value_BKSH, position_B, score_mod, execution)
    kernel = DECODE[execution.decode_kernel]
    kernel = partial(kernel, ring=True) if ring else kernel
    if execution.decode_kernel != "xla":
        slot = PartitionSpec(execution.row_axes)
        head = PartitionSpec(execution.row_axes, execution.head_axes)
        kernel = _on_devices(kernel, (head, head, head, slot), head, execution)
    return kernel(query_BNH, key_BKHS, value_BKSH, position_B, score_mod)


def attend_tokens(
    query_BTNH: Float[Array, "B T N H"],
    key_BKHS: Float[Array, "B K H S"],
    value_BKSH: Float[Array, "B K S H"],
    position_B: Int[Array, "B"],
    score_mod: ScoreMod = PLAIN,
    *,
    ring: bool = False,
    execution: Execution = ONE_DEVICE,
) -> Float[Array, "B T N H"]:
    """Compute `attend_cache` for T consecutive tokens per slot, the first of them at `position_B`.

    The `xla` kernel reads the cache once for all tokens of a slot; other kernels read the cache once for each token.
    """
    if execution.decode_kernel == "xla" and (ring or execution.cache_ways == 1):
        return _tokens_xla(query_BTNH, key_BKHS, value_BKSH, position_B, score_mod, ring=ring)

    def one(query_BNH: Array, position_B: Array) -> Array:
        how: Any = {"ring": ring, "execution": execution}
        return attend_cache(query_BNH, key_BKHS, value_BKSH, position_B, score_mod, **how)

    return each_token(one, query_BTNH, position_B)


def each_token(one: Callable[[Array, Array], Array], query_BTNH: Array, position_B: Array) -> Array:
    """Apply attention of one token per slot, a function `(queries, positions)`, to T consecutive tokens per slot."""
    tokens = range(query_BTNH.shape[1])
    return jnp.stack([one(query_BTNH[:, at], position_B + at) for at in tokens], axis=1)


def _attend_shared(
    query_BNH: Array,
    key_BKHS: Array,
    value_BKSH: Array,
    position_B: Array,
    scores: ScoreMod,
    execution: Execution,
) -> Array:
    """Compute `attend_cache` if devices share the positions of a slot."""
    axes, capacity = execution.cache_axes, key_BKHS.shape[3]
    kernel = PARTS[execution.decode_kernel]

    def run(query_BNH, key_BKHS, value_BKSH, position_B, score_mod):
        own = seen_of_device(position_B, capacity, score_mod, execution)
        parts = of_devices(kernel(query_BNH, key_BKHS, value_BKSH, *own, score_mod), axes)
        return joined([parts, *sinks_part(score_mod, key_BKHS.shape[1])], like=query_BNH)

    slot, head = PartitionSpec(execution.row_axes), PartitionSpec(execution.row_axes, execution.head_axes)
    keys = PartitionSpec(execution.row_axes, execution.head_axes, None, axes)
    values = PartitionSpec(execution.row_axes, execution.head_axes, axes)
    run = _on_devices(run, (head, keys, values, slot), head, execution)
    return run(query_BNH, key_BKHS, value_BKSH, position_B, scores)


def _on_devices(
    kernel: Callable[..., Any], in_specs: tuple[PartitionSpec, ...], out_spec: PartitionSpec, execution: Execution
) -> Callable[..., Any]:
    """Wrap an attention kernel so that every device runs it on its part of the arrays and the sinks."""

    def on_devices(*given: Any) -> Any:
        *arrays, score_mod = given

        def run(slides, sink_N, *arrays):
            return kernel(*arrays, replace(score_mod, slides=slides, sink_N=sink_N))

        specs = PartitionSpec(), PartitionSpec(execution.head_axes), *in_specs
        return execution.on_devices(run, specs, out_spec)(score_mod.slides, score_mod.sink_N, *arrays)

    return on_devices


def attend_pages(
    query_BNH: Float[Array, "B N H"],
    pages_ZSJU: Float[Array, "Z S J U"],
    table_BQ: Int[Array, "B Q"],
    position_B: Int[Array, "B"],
    score_mod: ScoreMod = PLAIN,
    *,
    execution: Execution,
) -> Float[Array, "B N H"]:
    """Compute paged attention: `attend_cache` over the pages that the table lists. Each device has its own pages.

    Args:
      pages_ZSJU: Z pages of S positions: for each key-value head its key, then its value, padded to U >= H.
      table_BQ: Page numbers of each slot in order; numbers past the last page are no page.
    """
    assert execution.pages_kernel is not None, "the cache is not stored in pages"
    head_dim, width = query_BNH.shape[-1], pages_ZSJU.shape[-1]
    score_mod = replace(score_mod, divisor=score_mod.divide_by(head_dim))
    kernel = PAGES[execution.pages_kernel]

    def run(query_BNH, pages_ZSJU, table_BQ, position_B, score_mod):
        pages, page_tokens, _, _ = pages_ZSJU.shape
        # A finished slot may have run past its pages, or have none: clip, so that it still sees a position.
        held_B = (table_BQ < pages).sum(axis=1, dtype=jnp.int32) * page_tokens
        newest_B = jnp.clip(position_B, 0, jnp.maximum(held_B - 1, 0))
        return kernel(query_BNH, pages_ZSJU, jnp.minimum(table_BQ, pages - 1), newest_B, score_mod)

    slot = PartitionSpec(execution.row_axes)
    head = PartitionSpec(execution.row_axes, execution.head_axes)
    page = PartitionSpec(execution.row_axes, None, execution.head_axes)
    query_BNH = jnp.pad(query_BNH, ((0, 0), (0, 0), (0, width - head_dim)))
    run = _on_devices(run, (head, page, slot, slot), head, execution)
    return run(query_BNH, pages_ZSJU, table_BQ, position_B, score_mod)[..., :head_dim]


def _decode_xla(
    query_BNH: Array,
    key_BKHS: Array,
    value_BKSH: Array,
    position_B: Array,
    score_mod: ScoreMod,
    *,
    ring: bool = False,
) -> Array:
    return _tokens_xla(query_BNH[:, None], key_BKHS, value_BKSH, position_B, score_mod, ring=ring)[:, 0]


def _tokens_xla(
    query_BTNH: Array, key_BKHS: Array, value_BKSH: Array, position_B: Array, score_mod: ScoreMod, *, ring: bool
) -> Array:
    slots, kv_heads, head_dim, capacity = key_BKHS.shape
    tokens = query_BTNH.shape[1]
    query_BTKGH = query_BTNH.reshape(slots, tokens, kv_heads, -1, head_dim)
    query_BKTGH = jnp.swapaxes(query_BTKGH, 1, 2)
    logit_BKTGS = jnp.einsum("BKTGH,BKHS->BKTGS", query_BKTGH, key_BKHS, preferred_element_type=jnp.float32)
    position_BT = position_B[:, None] + jnp.arange(tokens, dtype=position_B.dtype)[None]
    if ring:
        seen_BTS = seen_in_ring(position_BT, capacity, score_mod)
    else:
        # A finished slot may have run past its cache: clip, so that it still sees a position.
        newest_BT = jnp.minimum(position_BT, capacity - 1)
        seen_BTS = score_mod.in_window(newest_BT[:, :, None] - jnp.arange(capacity)[None, None])
    bias_B1T1S = mask_bias(seen_BTS)[:, None, :, None]
    score_BKTGS = score_mod.cap(logit_BKTGS / score_mod.divide_by(head_dim)) + bias_B1T1S
    sink_KG, most_BKTG1 = score_mod.sinks(kv_heads), score_BKTGS.max(axis=-1, keepdims=True)
    sink_1K1G1 = None if sink_KG is None else sink_KG[None, :, None, :, None]
    if sink_1K1G1 is not None:
        most_BKTG1 = jnp.maximum(most_BKTG1, sink_1K1G1)
    weight_BKTGS = jnp.exp(score_BKTGS - most_BKTG1)
    total_BKTG1 = weight_BKTGS.sum(axis=-1, keepdims=True)
    if sink_1K1G1 is not None:
        total_BKTG1 += jnp.exp(sink_1K1G1 - most_BKTG1)
    mixed_BKTGH = jnp.einsum(
        "BKTGS,BKSH->BKTGH", weight_BKTGS.astype(value_BKSH.dtype), value_BKSH, preferred_element_type=jnp.float32
    )
    mixed_BKTGH = (mixed_BKTGH / total_BKTG1).astype(value_BKSH.dtype)
    return jnp.swapaxes(mixed_BKTGH, 1, 2).reshape(query_BTNH.shape)


def _parts_xla(
    query_BNH: Array, key_BKHS: Array, value_BKSH: Array, first_B: Array, end_B: Array, score_mod: ScoreMod
) -> Parts:
    """Compute the softmax of one query per slot over its entries from `first_B` to before `end_B`."""
    slots, kv_heads, head_dim, _ = key_BKHS.shape
    query_BKGH = query_BNH.reshape(slots, kv_heads, -1, head_dim)
    logit_BKGS = jnp.einsum("BKGH,BKHS->BKGS", query_BKGH, key_BKHS, preferred_element_type=jnp.float32)
    return part_of(score_mod.cap(logit_BKGS / score_mod.divide_by(head_dim)), first_B, end_B, value_BKSH)


def _pages_xla(query_BNH: Array, pages_ZSJH: Array, table_BQ: Array, newest_B: Array, score_mod: ScoreMod) -> Array:
    """Compute paged attention, one page of every slot at a time, up to the last page of the longest slot."""
    slots, _, width = query_BNH.shape
    _, page_tokens, both, _ = pages_ZSJH.shape
    query_BKGH = query_BNH.reshape(slots, both // 2, -1, width)

    def body(index, carry):
        out_BKGH, sum_BKG, most_BKG = carry
        page_BSKYH = pages_ZSJH[table_BQ[:, index]].reshape(slots, page_tokens, both // 2, 2, width)
        key_BSKH, value_BSKH = page_BSKYH[:, :, :, 0], page_BSKYH[:, :, :, 1]
        logit_BKGS = jnp.einsum("BKGH,BSKH->BKGS", query_BKGH, key_BSKH, preferred_element_type=jnp.float32)
        seen_BS = score_mod.in_window(newest_B[:, None] - (index * page_tokens + jnp.arange(page_tokens))[None, :])
        score_BKGS = score_mod.cap(logit_BKGS / score_mod.divide_by(width))
        score_BKGS += mask_bias(seen_BS, lowest=LOWEST)[:, None, None, :]
        next_BKG = jnp.maximum(most_BKG, score_BKGS.max(axis=-1))
        kept_BKG, weight_BKGS = jnp.exp(most_BKG - next_BKG), jnp.exp(score_BKGS - next_BKG[..., None])
        new_BKGH = jnp.einsum(
            "BKGS,BSKH->BKGH", weight_BKGS.astype(value_BSKH.dtype), value_BSKH, preferred_element_type=jnp.float32
        )
        return kept_BKG[..., None] * out_BKGH + new_BKGH, kept_BKG * sum_BKG + weight_BKGS.sum(axis=-1), next_BKG

    zero_BKG = jnp.zeros(query_BKGH.shape[:3], jnp.float32)
    start_state = jnp.zeros(query_BKGH.shape, jnp.float32), zero_BKG, zero_BKG + LOWEST
    sink_KG = score_mod.sinks(both // 2)
    if sink_KG is not None:  # the sink starts the sums, as if it had been read first
        start_state = start_state[0], zero_BKG + 1, zero_BKG + sink_KG[None]
    out_BKGH, sum_BKG, _ = jax.lax.fori_loop(0, newest_B.max() // page_tokens + 1, body, start_state)
    return (out_BKGH / sum_BKG[..., None]).astype(query_BNH.dtype).reshape(query_BNH.shape)


def _lazy(module: str, name: str) -> Callable[..., Any]:
    """Return a kernel of `kernels/` that is imported when called: a JAX without this kernel still has the others."""

    def kernel(*arrays: Any, **how: Any) -> Any:
        return getattr(importlib.import_module(f"jaxrlhf.models.kernels.{module}"), name)(*arrays, **how)

    return kernel


ROWS: dict[str, Callable[..., Array]] = {
    "xla": attend_blocks,
    "flash": _lazy("gpu_rows", "flash_rows"),
    "splash": _lazy("tpu", "splash_rows"),
}
DECODE: dict[str, Callable[..., Array]] = {"xla": _decode_xla, "pallas": _lazy("gpu", "pallas_decode")}
PARTS: dict[str, Callable[..., Parts]] = {"xla": _parts_xla, "pallas": _lazy("gpu", "pallas_parts")}
"""Kernels of `DECODE`, over a part of the entries."""
PAGES: dict[str, Callable[..., Array]] = {
    "xla": _pages_xla,
    "pallas": _lazy("gpu_pages", "pallas_pages"),
    "ragged": _lazy("tpu", "ragged_pages"),
}

WITHOUT_SINKS = ("splash", "ragged")
"""JAX kernels that do not support attention sinks."""

LANES: dict[str, int] = {"ragged": 128}
"""Number that must divide the width of heads in pages, by kernel."""

WIDEST: dict[str, int] = {"ragged": 128}
"""Largest head width in pages, by kernel. JAX's kernel loads keys of wider heads in a way that Mosaic refuses."""
