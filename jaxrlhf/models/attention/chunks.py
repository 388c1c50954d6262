"""Chunked prefill: prompts run a chunk of tokens at a time, each against the keys and values before it.

Activations take the memory of a chunk, and chunks that no prompt reaches are not run.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Bool, Float, Int

from jaxrlhf.batch import Array
from jaxrlhf.models.attention.kv_cache import Prefix
from jaxrlhf.models.attention.linear_attention import LayerState
from jaxrlhf.models.attention.score_mod import LOWEST, PLAIN, ScoreMod, mask_bias


class Chunk(NamedTuple):
    """A chunk of prompts in one layer.

    Attributes:
      prefix: Keys and values of all layers of its kind, written before `start`.
      layer: int32 index of the layer, or of that which it borrows from, among those of its kind.
      start: int32 index of the chunk's first token in its prompt.
      length_P: Tokens of each prompt; None of layers without states.
    """

    prefix: Prefix
    layer: Array
    start: Array
    length_P: Array | None = None

    def real(self, tokens: int) -> Array:
        """`[P, C]`: true for tokens of the prompts."""
        assert self.length_P is not None, "layers with states want the lengths of prompts"
        return self.start + jnp.arange(tokens)[None] < self.length_P[:, None]

    def state(self) -> LayerState:
        """The layer's states before the chunk."""
        assert self.prefix.state is not None, "layers with states want a prefix that has them"
        state = self.prefix.state
        return jax.tree.map(lambda leaf: lax.dynamic_index_in_dim(leaf, self.layer, keepdims=False), state).turned()

    def before(self, start: Array, *, tokens: int) -> tuple[Array, Array]:
        """Keys and values of `tokens` tokens from `start` on."""

        def of_layer(leaf_LPSKH: Array) -> Array:
            _, prompts, _, heads, width = leaf_LPSKH.shape
            sizes = 1, prompts, tokens, heads, width
            return lax.dynamic_slice(leaf_LPSKH, (self.layer, 0, start, 0, 0), sizes)[0]

        return of_layer(self.prefix.key_LPSKH), of_layer(self.prefix.value_LPSKH)


def written(prefix: Prefix, new: Prefix, start: Array, *, working: Bool[Array, ""] | bool = True) -> Prefix:
    """The prefix with a chunk of all layers; as it was on a pipeline stage that is not working."""

    if prefix.sliding is not None and new.sliding is not None:
        near = written(prefix.sliding, new.sliding, start, working=working)
        far = written(prefix._replace(sliding=None), new._replace(sliding=None), start, working=working)
        return far._replace(sliding=near)

    def put(old_LPSKH: Array, new_LPCKH: Array) -> Array:
        at = 0, 0, start, 0, 0
        if working is not True:
            new_LPCKH = jnp.where(working, new_LPCKH, lax.dynamic_slice(old_LPSKH, at, new_LPCKH.shape))
        return lax.dynamic_update_slice(old_LPSKH, new_LPCKH.astype(old_LPSKH.dtype), at)

    def replaced(old: Array, new: Array) -> Array:
        return new.astype(old.dtype) if working is True else jnp.where(working, new.astype(old.dtype), old)

    state = None if prefix.state is None else jax.tree.map(replaced, prefix.state, new.state)
    return Prefix(put(prefix.key_LPSKH, new.key_LPSKH), put(prefix.value_LPSKH, new.value_LPSKH), state)


def attend_chunk(
    query_PCNH: Float[Array, "P C N H"],
    key_PCKH: Float[Array, "P C K H"],
    value_PCKU: Float[Array, "P C K U"],
    before: Callable[[Array], tuple[Array, Array]],
    start: Int[Array, ""],
    score_mod: ScoreMod = PLAIN,
) -> Float[Array, "P C N U"]:
    """Causal attention of a chunk to itself and to what is before it, a block of keys at a time.

        out = sum_b e^(m_b - m) o_b / sum_b e^(m_b - m) l_b    over blocks b of C keys

    with the largest score m_b, the sum l_b of the weights and the weighted values o_b of each block, in float32.
    XLA on every backend: the kernels of `attend` know of no queries that begin in the middle of their keys.

    Args:
      before: Function of an index that gives keys and values of the C tokens from it on; those from `start` on are
        not seen.
      start: Index of the chunk's first token in its prompt.

    Source: Dao et al. 2022 (FlashAttention, arXiv:2205.14135), section 3.1.
    """
    prompts, tokens, heads, head_dim = query_PCNH.shape
    kv_heads = key_PCKH.shape[2]
    query_PCKGH = score_mod.divided(query_PCNH).reshape(prompts, tokens, kv_heads, -1, head_dim)
    query_PKGCH = jnp.transpose(query_PCKGH, (0, 2, 3, 1, 4))
    query_PKMH = query_PKGCH.reshape(prompts, kv_heads, -1, head_dim)
    place_C = jnp.arange(tokens)

    def block(at: Array, key_PSKH: Array, value_PSKU: Array, seen_S: Array) -> tuple[Array, Array, Array]:
        # Both products then stream through contiguous memory.
        key_PKHS, value_PKSU = jnp.transpose(key_PSKH, (0, 2, 3, 1)), jnp.transpose(value_PSKU, (0, 2, 1, 3))
        logit_PKMS = jnp.einsum("PKMH,PKHS->PKMS", query_PKMH, key_PKHS, preferred_element_type=jnp.float32)
        seen_CS = score_mod.in_window((start + place_C)[:, None] - (at + place_C)[None, :]) & seen_S[None, :]
        hidden_MS = jnp.tile(mask_bias(seen_CS, lowest=LOWEST), (heads // kv_heads, 1))
        score_PKMS = score_mod.cap(logit_PKMS) + hidden_MS[None, None]
        most_PKM1 = score_PKMS.max(axis=-1, keepdims=True)
        weight_PKMS = jnp.exp(score_PKMS - most_PKM1)
        mixed_PKMU = jnp.einsum(
            "PKMS,PKSU->PKMU", weight_PKMS.astype(value_PSKU.dtype), value_PKSU, preferred_element_type=jnp.float32
        )
        return mixed_PKMU, weight_PKMS.sum(axis=-1, keepdims=True), most_PKM1

    def add(index: Array, so_far: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        at = index * tokens
        *sums, most_PKM1 = so_far
        *new_sums, other_PKM1 = block(at, *before(at), at + place_C < start)
        next_PKM1 = jnp.maximum(most_PKM1, other_PKM1)
        # Where a block has nothing to see its weights are 1, and so small beside those of the chunk that they are 0.
        kept_PKM1, added_PKM1 = jnp.exp(most_PKM1 - next_PKM1), jnp.exp(other_PKM1 - next_PKM1)
        mixed, total = (kept_PKM1 * old + added_PKM1 * new for old, new in zip(sums, new_sums, strict=True))
        return mixed, total, next_PKM1

    first = jnp.int32(0)
    if score_mod.window is not None:
        near = jnp.maximum(start - score_mod.window + 1, 0) // tokens
        first = near if score_mod.slides is None else jnp.where(score_mod.slides, near, 0)
    chunk = block(start, key_PCKH, value_PCKU, jnp.ones(tokens, bool))
    mixed_PKMU, total_PKM1, most_PKM1 = lax.fori_loop(first, -(-start // tokens), add, chunk)
    sink_KG = score_mod.sinks(kv_heads)
    if sink_KG is not None:
        # Beyond what float32 holds the sink takes all, and what is left is 0 either way.
        total_PKM1 += jnp.exp(jnp.repeat(sink_KG, tokens, axis=1)[None, :, :, None] - most_PKM1)
    mixed_PKGCU = (mixed_PKMU / total_PKM1).reshape(*query_PKGCH.shape[:4], -1)
    mixed_PCKGU = jnp.transpose(mixed_PKGCU, (0, 3, 1, 2, 4))
    return mixed_PCKGU.astype(value_PCKU.dtype).reshape(prompts, tokens, heads, -1)
