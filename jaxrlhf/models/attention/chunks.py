"""Chunked prefill: prompts run a chunk of tokens at a time. A chunk attends to itself and to the cache before it.

Activations take the memory of one chunk, and chunks past the end of all prompts are not run.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Bool, Float, Int

from jaxrlhf.batch import Array
from jaxrlhf.models.attention.interleaved import entries_before
from jaxrlhf.models.attention.kv_cache import Prefix
from jaxrlhf.models.attention.linear_attention import MixerWeights, Projected, mix_rows
from jaxrlhf.models.attention.mask import Heads, Mixed
from jaxrlhf.models.attention.score_mod import LOWEST, PLAIN, ScoreMod, mask_bias
from jaxrlhf.models.attention.softmax_parts import Parts, joined, of_devices, sinks_part
from jaxrlhf.models.config import LinearAttention
from jaxrlhf.models.execution import ONE_DEVICE, Execution


class Chunk(NamedTuple):
    """Causal mask of a chunk of prompts in one layer: a token sees the chunk and the cache before it.

    Attributes:
      prefix: Keys and values of all layers of the layer's kind, filled up to `start`.
      layer: int32, index of the layer among the layers of its kind; for a borrowing layer, the index of its lender.
      start: int32, index of the chunk's first token in its prompt.
      length_P: Number of tokens of each prompt; required only by layers with states.
    """

    prefix: Prefix
    layer: Array
    start: Array
    length_P: Array | None = None

    def attend(self, heads: Heads, score_mod: ScoreMod = PLAIN, execution: Execution = ONE_DEVICE) -> Array:
        """Compute attention of the chunk to itself and to the cache before it."""
        if execution.cache_ways > 1:
            return attend_shared_chunk(heads, self, score_mod, execution=execution)
        query_PCNH, key_PCKH, value_PCKU, (matrix, expand) = heads

        def before(at: Array) -> tuple[Array, Array]:
            return expand(matrix, *self.before(at, tokens=query_PCNH.shape[1]))

        return attend_chunk(query_PCNH, key_PCKH, value_PCKU, before, self.start, score_mod)

    def mix_states(self, linear: LinearAttention, projected: Projected, weights: MixerWeights) -> Mixed:
        """Continue linear attention from the layer's states before the chunk, up to the end of each prompt."""
        assert self.prefix.state is not None, "layers with states require a prefix with states"
        assert self.length_P is not None, "layers with states require prompt lengths"
        tokens = projected.input_RWKY.shape[1]
        real_PC = self.start + jnp.arange(tokens)[None] < self.length_P[:, None]
        before = partial(lax.dynamic_index_in_dim, index=self.layer, keepdims=False)
        state = jax.tree.map(before, self.prefix.state).turned()
        return mix_rows(linear, projected, weights, jnp.ones(real_PC.shape, jnp.int32), real_PC, state)

    def before(self, start: Array, *, tokens: int) -> tuple[Array, Array]:
        """Return keys and values of `tokens` entries from `start` on."""

        def of_layer(leaf_LPSKH: Array) -> Array:
            _, prompts, _, heads, width = leaf_LPSKH.shape
            sizes = 1, prompts, tokens, heads, width
            return lax.dynamic_slice(leaf_LPSKH, (self.layer, 0, start, 0, 0), sizes)[0]

        return of_layer(self.prefix.key_LPSKH), of_layer(self.prefix.value_LPSKH)


def write_chunk(
    prefix: Prefix,
    new: Prefix,
    start: Array,
    *,
    working: Bool[Array, ""] | bool = True,
    execution: Execution = ONE_DEVICE,
) -> Prefix:
    """Write a chunk of all layers into the prefix; a pipeline stage that is not working leaves it unchanged."""

    if prefix.sliding is not None and new.sliding is not None:
        parts = (prefix.sliding, new.sliding), (prefix._replace(sliding=None), new._replace(sliding=None))
        near, far = (write_chunk(*part, start, working=working, execution=execution) for part in parts)
        return far._replace(sliding=near)

    def put(old_LPSKH: Array, new_LPCKH: Array) -> Array:
        at = 0, 0, start, 0, 0
        if working is not True:
            new_LPCKH = jnp.where(working, new_LPCKH, lax.dynamic_slice(old_LPSKH, at, new_LPCKH.shape))
        return lax.dynamic_update_slice(old_LPSKH, new_LPCKH.astype(old_LPSKH.dtype), at)

    def replaced(old: Array, new: Array) -> Array:
        return new.astype(old.dtype) if working is True else jnp.where(working, new.astype(old.dtype), old)

    store = put if execution.cache_ways == 1 else partial(_put_own, start=start, execution=execution)
    state = None if prefix.state is None else jax.tree.map(replaced, prefix.state, new.state)
    return Prefix(store(prefix.key_LPSKH, new.key_LPSKH), store(prefix.value_LPSKH, new.value_LPSKH), state)


def _put_own(old_LPSKH: Array, new_LPCKH: Array, *, start: Array, execution: Execution) -> Array:
    """Write a chunk into a prefix whose positions devices share; each device writes its own positions."""
    ways, axes = execution.cache_ways, execution.cache_axes

    def put(old_LPSKH: Array, new_LPCKH: Array, start: Array) -> Array:
        device = lax.axis_index(axes)
        layers, prompts, tokens, *head = new_LPCKH.shape
        new_LPYCKH = new_LPCKH.reshape(layers, prompts, tokens // ways, ways, *head)
        own_LPYKH = lax.dynamic_index_in_dim(new_LPYCKH, (device - start) % ways, axis=3, keepdims=False)
        at = 0, 0, entries_before(start, device, ways), 0, 0
        return lax.dynamic_update_slice(old_LPSKH, own_LPYKH.astype(old_LPSKH.dtype), at)

    before, heads = (None, execution.row_axes), execution.over_heads(old_LPSKH.shape[3])
    old, new = PartitionSpec(*before, axes, heads), PartitionSpec(*before, None, heads)
    return execution.on_devices(put, (old, new, PartitionSpec()), old)(old_LPSKH, new_LPCKH, start)


def attend_chunk(
    query_PCNH: Float[Array, "P C N H"],
    key_PCKH: Float[Array, "P C K H"],
    value_PCKU: Float[Array, "P C K U"],
    before: Callable[[Array], tuple[Array, Array]],
    start: Int[Array, ""],
    score_mod: ScoreMod = PLAIN,
) -> Float[Array, "P C N U"]:
    """Compute causal attention of a chunk to itself and to the tokens before it, one block of keys at a time.

        out = sum_b e^(m_b - m) o_b / sum_b e^(m_b - m) l_b    over blocks b of C keys

    with the largest score m_b, the sum l_b of the weights and the weighted values o_b of each block, in float32.
    It is plain XLA on every backend: the kernels of `attend` do not support queries that start in the middle of their
    keys.

    Args:
      before: Function from an index to the keys and values of the C tokens from this index on; tokens from `start` on
        are not seen.
      start: Index of the chunk's first token in its prompt.

    Source: Dao et al. 2022 (FlashAttention, arXiv:2205.14135), section 3.1.
    """
    tokens, kv_heads = query_PCNH.shape[1], key_PCKH.shape[2]
    place_C = jnp.arange(tokens)
    block = _blocks(query_PCNH, kv_heads, start, score_mod)

    def add(index: Array, so_far: _Sums) -> _Sums:
        at = index * tokens
        return _added(so_far, block(*before(at), at + place_C, at + place_C < start))

    chunk = block(key_PCKH, value_PCKU, start + place_C, jnp.ones(tokens, bool))
    first = score_mod.first_seen(start, jnp.int32(0))
    mixed_PKMU, total_PKM1, most_PKM1 = lax.fori_loop(first // tokens, -(-start // tokens), add, chunk)
    sink_KG = score_mod.sinks(kv_heads)
    if sink_KG is not None:
        # If the exponential overflows float32, the sink takes all weight, and the result is 0 either way.
        total_PKM1 += jnp.exp(jnp.repeat(sink_KG, tokens, axis=1)[None, :, :, None] - most_PKM1)
    return _by_token(mixed_PKMU / total_PKM1, tokens).astype(value_PCKU.dtype)


def attend_shared_chunk(
    heads: Heads, chunk: Chunk, scores: ScoreMod = PLAIN, *, execution: Execution
) -> Float[Array, "P C N U"]:
    """Compute `attend_chunk` if devices share the prefix's positions: each attends to its own, and a gather joins."""
    query_PCNH, key_PCKH, value_PCKU, (matrix_CNU, expand) = heads
    tokens, ways, axes = query_PCNH.shape[1], execution.cache_ways, execution.cache_axes
    kept = chunk.prefix.key_LPSKH, chunk.prefix.value_LPSKH

    def run(query_PCNH, key_PCKH, value_PCKU, kept, matrix_CNU, layer, start, slides, sink_N):
        score_mod = replace(scores, slides=slides, sink_N=sink_N)
        device, kv_heads = lax.axis_index(axes), key_PCKH.shape[2]
        own = Chunk(Prefix(*kept), layer, start)
        size = math.gcd(tokens, kept[0].shape[2])
        block = _blocks(query_PCNH, kv_heads, start, score_mod)

        def add(index: Array, so_far: _Sums) -> _Sums:
            at = index * size
            place_S = device + ways * (at + jnp.arange(size))
            key_PSKH, value_PSKU = expand(matrix_CNU, *own.before(at, tokens=size))
            return _added(so_far, block(key_PSKH, value_PSKU, place_S, place_S < start))

        chunk = block(key_PCKH, value_PCKU, start + jnp.arange(tokens), jnp.ones(tokens, bool))
        nothing = *[jnp.zeros_like(sums) for sums in chunk[:2]], jnp.full_like(chunk[2], LOWEST)
        first, end = score_mod.first_seen(start, jnp.int32(0)), entries_before(start, device, ways)
        before = lax.fori_loop(first // (ways * size), -(-end // size), add, nothing)
        parts = [of_devices(_part(before), axes), _part(chunk), *sinks_part(score_mod, kv_heads, queries=tokens)]
        return _by_token(joined(parts, like=chunk[0].astype(value_PCKU.dtype)), tokens)

    rows, head_axes, whole = execution.row_axes, execution.head_axes, PartitionSpec()
    head = PartitionSpec(rows, None, head_axes)
    prefix = PartitionSpec(None, rows, axes, execution.over_heads(kept[0].shape[3]))
    matrix, sinks = PartitionSpec(None, head_axes), PartitionSpec(head_axes)
    specs = head, head, head, (prefix, prefix), matrix, whole, whole, whole, sinks
    arrays = query_PCNH, key_PCKH, value_PCKU, kept, matrix_CNU, chunk.layer, chunk.start, scores.slides, scores.sink_N
    return execution.on_devices(run, specs, head)(*arrays)


_Sums = tuple[Array, Array, Array]
"""Weighted values, sum of the weights, and largest score of each query over blocks of keys."""


def _blocks(
    query_PCNH: Array, kv_heads: int, start: Array, score_mod: ScoreMod
) -> Callable[[Array, Array, Array, Array], _Sums]:
    """Return the softmax of a chunk's queries over a block, as a function `(keys, values, positions, mask) -> sums`."""
    prompts, tokens, heads, head_dim = query_PCNH.shape
    query_PCKGH = score_mod.divided(query_PCNH).reshape(prompts, tokens, kv_heads, -1, head_dim)
    query_PKGCH = jnp.transpose(query_PCKGH, (0, 2, 3, 1, 4))
    query_PKMH = query_PKGCH.reshape(prompts, kv_heads, -1, head_dim)
    place_C = start + jnp.arange(tokens)

    def block(key_PSKH: Array, value_PSKU: Array, place_S: Array, seen_S: Array) -> _Sums:
        # Both products then stream through contiguous memory.
        key_PKHS, value_PKSU = jnp.transpose(key_PSKH, (0, 2, 3, 1)), jnp.transpose(value_PSKU, (0, 2, 1, 3))
        logit_PKMS = jnp.einsum("PKMH,PKHS->PKMS", query_PKMH, key_PKHS, preferred_element_type=jnp.float32)
        seen_CS = score_mod.in_window(place_C[:, None] - place_S[None, :]) & seen_S[None, :]
        hidden_MS = jnp.tile(mask_bias(seen_CS, lowest=LOWEST), (heads // kv_heads, 1))
        score_PKMS = score_mod.cap(logit_PKMS) + hidden_MS[None, None]
        most_PKM1 = score_PKMS.max(axis=-1, keepdims=True)
        weight_PKMS = jnp.exp(score_PKMS - most_PKM1)
        mixed_PKMU = jnp.einsum(
            "PKMS,PKSU->PKMU", weight_PKMS.astype(value_PSKU.dtype), value_PKSU, preferred_element_type=jnp.float32
        )
        return mixed_PKMU, weight_PKMS.sum(axis=-1, keepdims=True), most_PKM1

    return block


def _added(so_far: _Sums, block: _Sums) -> _Sums:
    """Add the sums of a block to the sums so far."""
    (*sums, most_PKM1), (*new_sums, other_PKM1) = so_far, block
    next_PKM1 = jnp.maximum(most_PKM1, other_PKM1)
    # If a query sees nothing in a block, its weights are 1 at the lowest score; the chunk's scores scale them to 0.
    kept_PKM1, added_PKM1 = jnp.exp(most_PKM1 - next_PKM1), jnp.exp(other_PKM1 - next_PKM1)
    mixed, total = (kept_PKM1 * old + added_PKM1 * new for old, new in zip(sums, new_sums, strict=True))
    return mixed, total, next_PKM1


def _part(sums: _Sums) -> Parts:
    mixed_PKMU, total_PKM1, most_PKM1 = sums
    return Parts(mixed_PKMU[:, :, None], total_PKM1[:, :, None, :, 0], most_PKM1[:, :, None, :, 0])


def _by_token(mixed_PKMU: Array, tokens: int) -> Array:
    """Reorder the queries' results from key-value heads to tokens, `[P, C, N, U]`."""
    prompts, kv_heads, _, width = mixed_PKMU.shape
    mixed_PKGCU = mixed_PKMU.reshape(prompts, kv_heads, -1, tokens, width)
    return jnp.transpose(mixed_PKGCU, (0, 3, 1, 2, 4)).reshape(prompts, tokens, -1, width)
