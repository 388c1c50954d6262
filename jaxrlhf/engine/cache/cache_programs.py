"""Programs of the KV cache: empty caches, prompts to and from slots and pages, and other capacities.

Programs that change the number of slots or their capacity work on one layer of the cache at a time, so that only one
layer exists twice.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxrlhf import models
from jaxrlhf.batch import Array
from jaxrlhf.engine.buckets import Shape
from jaxrlhf.engine.programs import CachedLayer, Prompts, take_rows
from jaxrlhf.models.attention.interleaved import resized
from jaxrlhf.models.attention.kv_cache import SlidingCache, cache_kind, is_ring
from jaxrlhf.models.attention.linear_attention import LayerState
from jaxrlhf.models.attention.pages import empty_pages as pages_of_layers
from jaxrlhf.models.attention.pages import insert_pages, take_pages
from jaxrlhf.models.config import ModelConfig


def empty_cache(*, slots: int, capacity: int, shape: Shape) -> list[CachedLayer]:
    """Create an empty slot cache."""
    return models.empty_cache(shape.config, slots=slots, capacity=capacity, execution=shape.execution)


def empty_pages(*, pages: int, shape: Shape) -> list[Array]:
    """Create `pages` empty pages for every layer, counted over all replicas."""
    assert isinstance(shape.config, ModelConfig), "only the decoder has a paged cache"
    return pages_of_layers(shape.config, pages=pages, execution=shape.execution)


def place(
    stored: CachedLayer, prompts: Prompts, layer: Array, row_I: Array, target_I: Array, *, shape: Shape
) -> CachedLayer:
    """Copy one layer (with pipeline stages: one layer of every stage) of prompt `row_I[i]` into row `target_I[i]`.

    Args:
      layer: Index among the layers with the same kind of cache.
    """

    def of_layer(leaf_LPSKH: Array) -> Array:
        stages = shape.execution.stages
        by_stage = leaf_LPSKH.reshape(stages, len(leaf_LPSKH) // stages, *leaf_LPSKH.shape[1:])
        return lax.dynamic_index_in_dim(by_stage, layer, axis=1, keepdims=False)

    prefix = prompts.prefix.mapped(of_layer, cache_kind(stored))
    return models.insert_prefix([stored], prefix, row_I, target_I, prompts.length_P, execution=shape.execution)[0]


def take_prefix(cache: list[models.LayerCache], row_P: Array, *, width: int, shape: Shape) -> models.Prefix:
    """Return the first `width` positions of cache rows in the form of a prefill's result; zeros past the capacity."""
    stages = shape.execution.stages

    def of_rows(stored: models.LayerCache) -> models.LayerCache:
        by_stage = jax.tree.map(lambda leaf: leaf.reshape(stages, -1, *leaf.shape[1:])[:, row_P], stored)
        return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), by_stage)

    def of_layers(leaves_IPSKH: tuple[Array, ...]) -> Array:
        leaf_GIPSKH = jnp.stack([leaf.reshape(stages, -1, *leaf.shape[1:]) for leaf in leaves_IPSKH], axis=1)
        return leaf_GIPSKH.reshape(-1, *leaf_GIPSKH.shape[2:])

    def of_kind(cache: Sequence[models.LayerCache]) -> models.Prefix:
        kept = [of_rows(stored).first(width, ways=shape.execution.cache_ways) for stored in cache]
        keys, values = map(of_layers, zip(*kept, strict=True))
        return models.Prefix(keys, values)

    sliding = [stored for stored in cache if isinstance(stored, SlidingCache)]
    others = of_kind([stored for stored in cache if not isinstance(stored, SlidingCache)])
    return others._replace(sliding=of_kind(sliding)) if sliding else others


def take_prefix_from_pages(layers: list[Array], page_GPQ: Array, *, width: int, shape: Shape) -> models.Prefix:
    """Return the first `width` entries of prompts in pages `page_GPQ[g, p]` of replica g, as a prefill's result."""
    assert isinstance(shape.config, ModelConfig), "only the decoder has a paged cache"
    head_dim, execution = shape.config.head_dim, shape.execution
    taken = [take_pages(pages, page_GPQ, width=width, head_dim=head_dim, execution=execution) for pages in layers]
    keys, values = map(jnp.stack, zip(*taken, strict=True))
    return models.Prefix(keys, values)


def resize(stored: CachedLayer, row_GB: Array | None, *, capacity: int, shape: Shape) -> CachedLayer:
    """Return a cache layer with another capacity and the kept rows only; states and rings keep their capacity.

    Args:
      row_GB: Rows to keep of each replica, counted from the replica's first row; None keeps all.
    """
    if row_GB is not None:
        row_GB = jnp.tile(row_GB, (shape.execution.stages, 1))
        stored = jax.tree.map(lambda leaf: take_rows(leaf, row_GB), stored)
    if isinstance(stored, LayerState) or is_ring(stored):
        return stored
    resize_to: Any = partial(resized, positions=capacity, ways=shape.execution.cache_ways)
    return type(stored)(resize_to(stored.key_BKHS, axis=3), resize_to(stored.value_BKSH, axis=2))


def place_in_pages(
    pages_ZSJU: Array, prefix: models.Prefix, layer: Array, row_I: Array, page_GIQ: Array, *, shape: Shape
) -> Array:
    """Copy one layer of prompt `row_I[i]` into pages `page_GIQ[g, i]` of replica g, for each i."""
    both = prefix.key_LPSKH, prefix.value_LPSKH
    key_PSKH, value_PSKH = (lax.dynamic_index_in_dim(leaf_LPSKH, layer, keepdims=False) for leaf_LPSKH in both)
    return insert_pages(pages_ZSJU, key_PSKH, value_PSKH, row_I, page_GIQ, execution=shape.execution)


def add_pages(pages_ZSJU: Array, *, pages: int, shape: Shape) -> Array:
    """Append `pages` empty pages to a layer in each replica."""
    parts_GZSJU = pages_ZSJU.reshape(shape.replicas, -1, *pages_ZSJU.shape[1:])
    parts_GZSJU = jnp.pad(parts_GZSJU, ((0, 0), (0, pages), (0, 0), (0, 0), (0, 0)))
    return parts_GZSJU.reshape(-1, *pages_ZSJU.shape[1:])
