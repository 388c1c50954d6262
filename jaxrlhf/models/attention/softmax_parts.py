"""Softmax over parts of a cache, on one device or on several, and the combination of the parts.

    out = sum_p e^(m_p - m) o_p / sum_p e^(m_p - m) l_p

with each part's largest score m_p, its sum l_p of weights and its weighted values o_p, and m the largest m_p.

Source: Dao et al. 2023, Flash-Decoding for long-context inference.
"""

from collections.abc import Sequence
from functools import reduce
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax

from jaxrlhf.batch import Array
from jaxrlhf.models.attention.interleaved import entries_before
from jaxrlhf.models.attention.score_mod import LOWEST, ScoreMod, mask_bias
from jaxrlhf.models.execution import Execution


class Parts(NamedTuple):
    """Softmax over P parts of each slot's cache: weighted values, sums of weights, and largest scores."""

    out_BKPGH: Array
    sum_BKPG: Array
    most_BKPG: Array


def joined(parts: Sequence[Parts], *, like: Array) -> Array:
    """Combine the parts into the softmax over all of them, in the shape and dtype of `like`."""
    out_BKGH, total_BKG, _ = _summed(parts)
    out_BKGH = out_BKGH / jnp.asarray(total_BKG)[..., None]
    return out_BKGH[..., : like.shape[-1]].astype(like.dtype).reshape(like.shape)


def of_devices(parts: Parts, axes: tuple[str, ...]) -> Parts:
    """Gather one part from each device along mesh axes: `head_dim + 2` float32 numbers per query."""
    out_BKGH, total_BKG, most_BKG = _summed([parts])
    packed_BKGU = jnp.concatenate([out_BKGH, total_BKG[..., None], most_BKG[..., None]], axis=-1)
    packed_BKPGU = lax.all_gather(packed_BKGU, axes, axis=2)
    return Parts(packed_BKPGU[..., :-2], packed_BKPGU[..., -2], packed_BKPGU[..., -1])


def part_of(score_BKGS: Array, first_B: Array, end_B: Array, value_BKSH: Array) -> Parts:
    """Compute the softmax of scores over each slot's entries from `first_B` to before `end_B`, as one part."""
    place_1S = jnp.arange(score_BKGS.shape[-1])[None]
    bias_BS = mask_bias((place_1S >= first_B[:, None]) & (place_1S < end_B[:, None]), lowest=LOWEST)
    score_BKGS += bias_BS[:, None, None]
    most_BKG = score_BKGS.max(axis=-1)
    weight_BKGS = jnp.exp(score_BKGS - most_BKG[..., None])
    mixed_BKGH = jnp.einsum(
        "BKGS,BKSH->BKGH", weight_BKGS.astype(value_BKSH.dtype), value_BKSH, preferred_element_type=jnp.float32
    )
    return Parts(mixed_BKGH[:, :, None], weight_BKGS.sum(axis=-1)[:, :, None], most_BKG[:, :, None])


def sinks_part(score_mod: ScoreMod, kv_heads: int, *, queries: int = 1) -> list[Parts]:
    """Return the part of the sinks, which have no value, for `queries` queries of each head; empty without sinks."""
    sink_KG = score_mod.sinks(kv_heads)
    if sink_KG is None:
        return []
    most_1K1G = jnp.repeat(sink_KG, queries, axis=1)[None, :, None]
    return [Parts(jnp.zeros((*most_1K1G.shape, 1), jnp.float32), jnp.ones_like(most_1K1G), most_1K1G)]


def seen(newest_B: Array, score_mod: ScoreMod) -> tuple[Array, Array]:
    """Return the first position that each slot sees, and the position after the last."""
    return score_mod.first_seen(newest_B, jnp.zeros_like(newest_B)), newest_B + 1


def seen_of_device(position_B: Array, capacity: int, score_mod: ScoreMod, execution: Execution) -> tuple[Array, Array]:
    """Return the first of this device's entries that each slot sees, and the entry after the last.

    Several devices share the positions of a slot.
    """
    device, ways = lax.axis_index(execution.cache_axes), execution.cache_ways
    # A finished slot may have run past its cache: clip, so that it still sees a position.
    first_B, end_B = seen(jnp.minimum(position_B, capacity - 1), score_mod)
    return entries_before(first_B, device, ways), entries_before(end_B, device, ways)


def _summed(parts: Sequence[Parts]) -> tuple[Array, Array, Array]:
    """Return the weighted values, sums of weights and largest scores of all parts together."""
    most_BK1G = reduce(jnp.maximum, [each.most_BKPG.max(axis=2, keepdims=True) for each in parts])
    share = [jnp.exp(each.most_BKPG - most_BK1G) for each in parts]
    total_BKG = sum((own * each.sum_BKPG).sum(axis=2) for own, each in zip(share, parts, strict=True))
    out_BKGH = sum((own[..., None] * each.out_BKPGH).sum(axis=2) for own, each in zip(share, parts, strict=True))
    return jnp.asarray(out_BKGH), jnp.asarray(total_BKG), most_BK1G[:, :, 0]
