"""KV cache in slots: one pair of arrays per layer.

The cache is a list of per-layer arrays, not one stacked array: a loop copies a stacked cache at every token. Keys are
stored as `[slots, kv_heads, head_dim, positions]` and values as `[slots, kv_heads, positions, head_dim]`, the order
in which `attend_cache` streams them.

With pipeline stages the list has an entry for each layer of a stage. An entry has this layer of every stage, one stage
after another along the dimension of slots, which is split over the stages.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Float, Int, Num

from jaxrlhf.batch import Array
from jaxrlhf.models.attention.attention import attend_tokens
from jaxrlhf.models.attention.interleaved import by_device, interleave, resized
from jaxrlhf.models.attention.linear_attention import LayerState, Unsettled, empty_state
from jaxrlhf.models.attention.pages import LayerPages
from jaxrlhf.models.attention.rings import NOWHERE, prompts_of_ring, ring_of_prompts, windowed_layers
from jaxrlhf.models.attention.score_mod import ScoreMod
from jaxrlhf.models.causal_lm import causal_lm_method
from jaxrlhf.models.config import LAYERS, LENDERS, LINEAR_LAYERS, SLIDING_LAYERS, ModelConfig
from jaxrlhf.models.execution import ONE_DEVICE, Execution


class Prefix(NamedTuple):
    """Keys (rotated) and values of P prompts after prefill, and the states of layers with linear attention.

    Attributes:
      state: States `[L, P, ...]` of layers with linear attention; None if there are no such layers.
      sliding: Keys and values of layers with a window, if these form a separate stack; else None.
    """

    key_LPSKH: Array
    value_LPSKH: Array
    state: LayerState | None = None
    sliding: "Prefix | None" = None

    def of_stack(self, stack: str) -> "Prefix":
        """Return the keys and values that the layers of a stack keep, or borrow."""
        if LENDERS.get(stack, stack) != SLIDING_LAYERS:
            return self
        assert self.sliding is not None, "the prefix has no keys and values of sliding layers"
        return self.sliding

    def interleave(self, ways: int) -> "Prefix":
        """Interleave positions for `ways` devices that share a cache's positions; states stay unchanged."""
        keys, values = (interleave(leaf_LPSKH, ways, axis=2) for leaf_LPSKH in self[:2])
        return Prefix(keys, values, self.state, self.sliding and self.sliding.interleave(ways))

    def mapped(self, function: Callable[[Array], Array], keeps: str) -> "Prefix":
        """Apply a function to the arrays of one kind (see `cache_kind`); the result has no layers of other kinds."""
        if keeps != "keys":
            nothing = Prefix(self.key_LPSKH[:0], self.value_LPSKH[:0])
            return nothing._replace(**{keeps: jax.tree.map(function, getattr(self, keeps))})
        return Prefix(function(self.key_LPSKH), function(self.value_LPSKH))


class LayerCache(NamedTuple):
    """KV cache of one layer, for B slots of S positions."""

    key_BKHS: jax.Array
    value_BKSH: jax.Array

    @property
    def capacity(self) -> int:
        """Number of positions of each slot."""
        return self.key_BKHS.shape[3]

    def write(
        self,
        key_BTKH: Num[Array, "B T K H"],
        value_BTKU: Num[Array, "B T K U"],
        position_BT: Int[Array, "B T"],
        *,
        execution: Execution = ONE_DEVICE,
    ) -> "LayerCache":
        """Write T new entries per slot, each at its own position; positions at or past the capacity are skipped."""
        ways, axes = execution.cache_ways, execution.cache_axes
        if ways == 1 or is_ring(self):
            return self._replace_entries(key_BTKH, value_BTKU, position_BT)

        def put(stored: LayerCache, key_BTKH: Array, value_BTKU: Array, position_BT: Array) -> LayerCache:
            own_BT = position_BT % ways == jax.lax.axis_index(axes)
            return stored._replace_entries(key_BTKH, value_BTKU, jnp.where(own_BT, position_BT // ways, NOWHERE))

        rows, heads = execution.row_axes, execution.over_heads(self.key_BKHS.shape[1])
        slot, head = PartitionSpec(rows), PartitionSpec(rows, None, heads)
        specs: Any = PartitionSpec(rows, heads, None, axes), PartitionSpec(rows, heads, axes)
        stored = type(self)(*specs)
        return execution.on_devices(put, (stored, head, head, slot), stored)(self, key_BTKH, value_BTKU, position_BT)

    def _replace_entries(self, key_BTKH: Array, value_BTKU: Array, entry_BT: Array) -> "LayerCache":
        # One update per slot, not one scatter over slots: each device then writes its own slots.
        keys = jax.vmap(lambda stored_KHS, new_KHT, at_T: stored_KHS.at[:, :, at_T].set(new_KHT, mode="drop"))
        values = jax.vmap(lambda stored_KSH, new_KTH, at_T: stored_KSH.at[:, at_T].set(new_KTH, mode="drop"))
        key_BKHT, value_BKTU = jnp.moveaxis(key_BTKH, 1, 3), jnp.moveaxis(value_BTKU, 1, 2)
        return self._replace(
            key_BKHS=keys(self.key_BKHS, key_BKHT.astype(self.key_BKHS.dtype), entry_BT),
            value_BKSH=values(self.value_BKSH, value_BKTU.astype(self.value_BKSH.dtype), entry_BT),
        )

    def attend(
        self,
        query_BTNH: Float[Array, "B T N H"],
        position_B: Int[Array, "B"],
        score_mod: ScoreMod,
        *,
        execution: Execution,
    ) -> Float[Array, "B T N H"]:
        """Attend with T consecutive tokens per slot, the first at `position_B`, to this layer's cache."""
        return attend_tokens(query_BTNH, *self, position_B, score_mod, execution=execution)

    def first(self, width: int, *, ways: int = 1) -> tuple[Array, Array]:
        """Return keys and values of the first positions, `[B, W, K, H]` as in prompts; zeros past the capacity.

        Args:
          ways: Number of devices that share the positions of a slot.
        """
        key_BSKH, value_BSKH = (resized(leaf, width, ways, axis=1) for leaf in _as_prompts(self))
        return key_BSKH, value_BSKH


class SlidingCache(LayerCache):
    """KV cache of a layer with a window, if such layers form a separate stack."""

    __slots__ = ()


class _Ring:
    """Ring cache: only the newest positions are kept, position p in entry p modulo the number of entries."""

    __slots__ = ()

    def write(self: Any, key_BTKH: Array, value_BTKU: Array, position_BT: Array, *, execution: Execution = ONE_DEVICE):
        """Write T new entries per slot, in place of the oldest entries."""
        entry_BT = jnp.where(position_BT >= NOWHERE, NOWHERE, position_BT % self.capacity)
        return LayerCache.write(self, key_BTKH, value_BTKU, entry_BT, execution=execution)

    def attend(self: Any, query_BTNH: Array, position_B: Array, score_mod: ScoreMod, *, execution: Execution) -> Array:
        """Attend with T consecutive tokens per slot to the positions in their windows."""
        near = replace(score_mod, slides=None)
        key_BKHS, value_BKSH = self
        return attend_tokens(query_BTNH, key_BKHS, value_BKSH, position_B, near, ring=True, execution=execution)

    def first(self: Any, width: int, *, ways: int = 1) -> tuple[Array, Array]:
        """Return keys and values of the first positions, `[B, W, K, H]`; overwritten positions have other entries."""
        key_BWKH, value_BWKH = (
            interleave(prompts_of_ring(leaf_BRKH, width=width), ways, axis=1) for leaf_BRKH in _as_prompts(self)
        )
        return key_BWKH, value_BWKH


class RingCache(_Ring, LayerCache):
    """Ring cache of a layer in a stack that may also have layers without a window."""

    __slots__ = ()


class SlidingRing(_Ring, SlidingCache):
    """Ring cache of a layer in a separate stack of layers with a window."""

    __slots__ = ()


def is_ring(stored: Any) -> bool:
    """Return whether a layer's cache is a ring."""
    return isinstance(stored, _Ring)


Cache = list[LayerCache] | list[LayerPages] | list[LayerCache | LayerState | Unsettled]
"""Caches of all layers that keep keys and values (in slots or in pages), or states of linear attention; these are
unsettled only in the result of `decode`."""


def cache_kind(stored: Any) -> str:
    """Return the part of a `Prefix` that a layer keeps: `state`, `sliding`, or `keys` for all other layers."""
    return "state" if isinstance(stored, LayerState) else "sliding" if isinstance(stored, SlidingCache) else "keys"


def capacity_of(cache: Cache) -> int | None:
    """Return the number of positions of each slot; None (no bound) if all layers have rings or states."""
    return next((stored.capacity for stored in cache if not isinstance(stored, LayerState | Unsettled | _Ring)), None)


@causal_lm_method
def empty_cache(
    config: ModelConfig,
    *,
    slots: int,
    capacity: int,
    execution: Execution = ONE_DEVICE,
) -> list[Any]:
    """Return an empty cache for `slots` sequences of at most `capacity` tokens, with states of linear attention.

    Build it under jit with `out_shardings`, so that each device allocates its own part.
    """
    stages, dtype = execution.stages, execution.dtype

    def layer(stack: str, near: bool) -> LayerCache | LayerState:
        if config.linear is not None and stack == LINEAR_LAYERS:
            return empty_state(config.linear, stages * slots, dtype=dtype)
        heads, key_dim, value_dim = _widths(config.of_stack(stack), execution)
        kind, entries = (SlidingCache if stack == SLIDING_LAYERS else LayerCache), capacity
        if near and execution.ring_entries is not None:
            kind, entries = (SlidingRing if stack == SLIDING_LAYERS else RingCache), execution.ring_entries
        keys, values = (stages * slots, heads, key_dim, entries), (stages * slots, heads, entries, value_dim)
        return kind(jnp.zeros(keys, dtype), jnp.zeros(values, dtype))

    stacks = config.pattern.stack_of()[: config.num_layers // stages]
    kept = [stack for stack in stacks if stack not in LENDERS]
    own = [layer(stack, near) for stack, near in zip(kept, windowed_layers(config, stages=stages), strict=True)]
    return [*own, layer(LAYERS, False)] if execution.mtp_slots else own


def empty_prefix(config: ModelConfig, *, prompts: int, width: int, execution: Execution) -> Prefix:
    """Return zeros for prompts of `width` tokens, to be written part by part."""
    counts = Counter(config.pattern.stack_of())

    def zeros(stack: str, count: int) -> Prefix:
        heads, *dims = _widths(config.of_stack(stack), execution)
        keys, values = (jnp.zeros((count, prompts, width, heads, dim), execution.dtype) for dim in dims)
        return Prefix(keys, values)

    if config.full_heads is not None:
        sliding = zeros(SLIDING_LAYERS, counts[SLIDING_LAYERS]) if counts[SLIDING_LAYERS] else None
        return zeros(LAYERS, counts[LAYERS])._replace(sliding=sliding)
    prefix = zeros(LAYERS, config.attention_layers + bool(execution.mtp_slots))
    if config.linear is None:
        return prefix
    state = empty_state(config.linear, counts[LINEAR_LAYERS], prompts, dtype=execution.dtype)
    return prefix._replace(state=jax.tree.map(lambda leaf: jnp.swapaxes(leaf, 2, 3), state))


def insert_prefix(
    cache: list[Any],
    prefix: Prefix,
    row_I: Int[Array, "I"],
    slot_I: Int[Array, "I"],
    length_P: Int[Array, "P"] | None = None,
    *,
    execution: Execution = ONE_DEVICE,
) -> list[Any]:
    """Copy prompt `row_I[i]` into slot `slot_I[i]`, for each i; several slots may take one prompt.

    A slot index at or past the number of slots is skipped, so a program compiled for I insertions can do fewer.
    The function is pure; donate the cache to write in place.

    Args:
      length_P: Number of tokens of each prompt; required for rings that are shorter than prompts, or if devices share
        positions.

    Raises:
      ValueError: The prompts are longer than the cache's capacity.
    """
    width, ways = prefix.key_LPSKH.shape[2], execution.cache_ways
    whole = [stored for stored in cache if isinstance(stored, LayerCache) and not is_ring(stored)]
    capacity = min((stored.capacity for stored in whole), default=width)
    if width > capacity:
        raise ValueError(f"prompts of {width} tokens do not fit a cache of capacity {capacity}; enlarge the cache")

    def insert(cache, prefix, row_I, slot_I, length_P):
        inserted, places = [], Counter[str]()
        for stored in cache:
            keeps = cache_kind(stored)
            place = places[keeps]
            if isinstance(stored, LayerState):
                new = stored.put(jax.tree.map(lambda leaf: leaf[place], prefix.state), row_I, slot_I)  # noqa: B023
            else:
                own = prefix.sliding if keeps == "sliding" else prefix
                kept = own.key_LPSKH[place], own.value_LPSKH[place]
                if is_ring(stored) and (width > stored.capacity or ways > 1):
                    assert length_P is not None, "prompts longer than a ring require their lengths"
                    sizes = {"entries": stored.capacity, "ways": ways}
                    key_ISKH, value_ISKH = (ring_of_prompts(leaf, row_I, length_P, **sizes) for leaf in kept)
                else:
                    key_ISKH, value_ISKH = (leaf_PSKH[row_I] for leaf_PSKH in kept)
                own_ways = 1 if is_ring(stored) else ways
                new = type(stored)(
                    _place(stored.key_BKHS, jnp.transpose(key_ISKH, (0, 2, 3, 1)), slot_I, own_ways, axis=3),
                    _place(stored.value_BKSH, jnp.transpose(value_ISKH, (0, 2, 1, 3)), slot_I, own_ways, axis=2),
                )
            inserted.append(new)
            places[keeps] += 1
        return inserted

    if (pipeline := execution.pipeline) is not None:
        by_stage, everywhere = PartitionSpec(pipeline.axes), PartitionSpec()
        insert = pipeline.on_stages(insert, (by_stage, by_stage, everywhere, everywhere, everywhere), by_stage)
    return insert(cache, prefix, row_I, slot_I, length_P)


def _place(stored: jax.Array, block: Array, slot_I: Array, ways: int, *, axis: int) -> jax.Array:
    """Write each block at the start of its slot; `ways` devices share the positions along `axis`."""
    if ways > 1:
        parts: Any = by_device(stored, ways, axis=axis)
        own = by_device(block.astype(stored.dtype), ways, axis=axis)
        start = tuple(slice(size) for size in own.shape[1:])
        return parts.at[(slot_I, *start)].set(own, mode="drop").reshape(stored.shape)
    _, _, first, second = block.shape
    return stored.at[slot_I, :, :first, :second].set(block.astype(stored.dtype), mode="drop")


def _as_prompts(stored: LayerCache) -> tuple[Array, Array]:
    """Transpose keys and values to `[B, S, K, H]`."""
    return jnp.transpose(stored.key_BKHS, (0, 3, 1, 2)), jnp.transpose(stored.value_BKSH, (0, 2, 1, 3))


def _widths(config: ModelConfig, execution: Execution) -> tuple[int, int, int]:
    """Return the number of heads, and the widths of a key and of a value."""
    if config.latent is not None:
        return 1, config.latent.rope_dim, config.latent.rank
    copies = execution.kv_copies(config.num_kv_heads)
    return config.num_kv_heads * copies, config.head_dim, config.head_dim
