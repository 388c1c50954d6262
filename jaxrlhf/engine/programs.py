"""What runs on the devices: prefill, insert and decode as pure functions of their state.

`Engine` compiles them. Every slot is computed at every step; a slot that is not active draws
nothing and keeps its state.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Bool, Int

from jaxrlhf import models
from jaxrlhf.architecture import ModelConfig
from jaxrlhf.batch import Array, Params
from jaxrlhf.engine.sampling import Sampled, Settings, sample, uniforms
from jaxrlhf.models.cache import Cache

NO_TOKEN = -1


@dataclass(frozen=True)
class Shape:
    """What a program is compiled for, beside the lengths that vary between programs.

    Attributes:
      capacity: Tokens that a slot's cache holds.
      tokens_per_dispatch: Most tokens that a slot draws in one `decode`.
      dtype: Of activations and of the cache.
      pipeline: How layers are divided over stages; None where they are not.
      attention: Kernels for the engine's mesh.
    """

    config: ModelConfig
    slots: int
    capacity: int
    max_response_tokens: int
    stop_tokens: tuple[int, ...]
    tokens_per_dispatch: int
    dtype: Any
    pipeline: models.Pipeline | None = None
    attention: models.Attention = models.XLA


class Prompts(NamedTuple):
    """Prefilled prompts: what predicts each one's first response token, and its keys and values."""

    hidden_PD: Array
    prefix: models.Prefix
    length_P: Array


class Insertion(NamedTuple):
    """I responses to start: which prompt row goes into which slot, and what the draws depend on.

    A slot past the last is skipped, so that one program serves any number up to I.
    """

    row_I: Array
    slot_I: Array
    seed_B: Array
    request_B: Array
    settings: Settings


class Slots(NamedTuple):
    """The state of B slots.

    Attributes:
      cache: Keys and values of the tokens before the newest.
      token_B: The newest token, which is not in the cache yet.
      logp_B: Its log-probability.
      cached_B: Tokens in the cache, so the newest token's position.
      drawn_B: Tokens of the response, the newest included.
      active_B: Whether the response goes on.
      seed_B, request_B, settings: What the draws depend on.
    """

    cache: Cache
    token_B: Array
    logp_B: Array
    cached_B: Array
    drawn_B: Array
    active_B: Array
    seed_B: Array
    request_B: Array
    settings: Settings


class Window(NamedTuple):
    """What one `decode` drew: row 0 is each slot's newest token at the start, the others follow.

    Attributes:
      token_WB: int32; `NO_TOKEN` where a slot drew nothing.
      active_B: Whether the response goes on.
    """

    token_WB: Array
    logp_WB: Array
    active_B: Array


def empty_slots(*, shape: Shape) -> Slots:
    """Slots none of which is active."""
    slots = shape.slots
    cache = models.empty_cache(
        shape.config, slots=slots, capacity=shape.capacity, dtype=shape.dtype, pipeline=shape.pipeline
    )
    return Slots(
        cache=cache,
        token_B=jnp.zeros(slots, jnp.int32),
        logp_B=jnp.zeros(slots, jnp.float32),
        cached_B=jnp.zeros(slots, jnp.int32),
        drawn_B=jnp.zeros(slots, jnp.int32),
        active_B=jnp.zeros(slots, bool),
        seed_B=jnp.zeros(slots, jnp.uint32),
        request_B=jnp.zeros(slots, jnp.uint32),
        settings=Settings(
            temperature_B=jnp.ones(slots, jnp.float32),
            top_p_B=jnp.ones(slots, jnp.float32),
            top_k_B=jnp.zeros(slots, jnp.int32),
            min_tokens_B=jnp.zeros(slots, jnp.int32),
            greedy_B=jnp.zeros(slots, bool),
        ),
    )


def prefill(params: Params, token_PS: Int[Array, "P S"], length_P: Int[Array, "P"], *, shape: Shape) -> Prompts:
    """Run prompts once; their responses, however many, start from the result."""
    hidden_PD, prefix = models.prefill(
        params,
        shape.config,
        token_PS,
        length_P,
        dtype=shape.dtype,
        attention=shape.attention,
        pipeline=shape.pipeline,
    )
    return Prompts(hidden_PD, prefix, length_P)


def insert(params: Params, slots: Slots, prompts: Prompts, insertion: Insertion, *, shape: Shape) -> Slots:
    """Start responses: copy each prompt's cache into its slot and draw the first token."""
    row_I, slot_I = insertion.row_I, insertion.slot_I
    logits_IV = models.logits(params, shape.config, prompts.hidden_PD)[row_I]
    drawn_I = jnp.zeros_like(row_I)
    token_I, logp_I = _draw(logits_IV, drawn_I, insertion, shape=shape)
    drawn_I = drawn_I + 1

    def put(stored_B, new_I):
        return stored_B.at[slot_I].set(new_I, mode="drop")

    return Slots(
        cache=models.insert_prefix(slots.cache, prompts.prefix, row_I, slot_I, pipeline=shape.pipeline),
        token_B=put(slots.token_B, token_I),
        logp_B=put(slots.logp_B, logp_I),
        cached_B=put(slots.cached_B, prompts.length_P[row_I]),
        drawn_B=put(slots.drawn_B, drawn_I),
        active_B=put(slots.active_B, ~_ended(token_I, drawn_I, shape=shape)),
        seed_B=put(slots.seed_B, insertion.seed_B),
        request_B=put(slots.request_B, insertion.request_B),
        settings=jax.tree.map(put, slots.settings, insertion.settings),
    )


def decode(params: Params, slots: Slots, *, shape: Shape, capacity: int) -> tuple[Slots, Window]:
    """Draw up to `tokens_per_dispatch` tokens in every active slot; stops early when none is left.

    Args:
      slots: Donate it.
      capacity: Cache positions to work on; active slots must not outgrow them. Fewer than the
        cache has cost a copy of that part and save reading the rest at every token.
    """
    width = shape.tokens_per_dispatch
    # Slices of stacked weights inside the loop would be copied at every token.
    layers = models.unstack_layers(params, shape.config, pipeline=shape.pipeline)
    whole = slots.cache
    slots = slots._replace(cache=_shorten(whole, capacity))
    window = Window(
        jnp.full((width + 1, shape.slots), NO_TOKEN, jnp.int32).at[0].set(slots.token_B),
        jnp.zeros((width + 1, shape.slots), jnp.float32).at[0].set(slots.logp_B),
        slots.active_B,
    )

    def more(carry):
        count, _, window = carry
        return (count < width) & window.active_B.any()

    def step(carry):
        count, slots, window = carry
        drawing_B = slots.active_B
        slots = _step(layers, params, slots, shape=shape)
        window = Window(
            window.token_WB.at[count + 1].set(jnp.where(drawing_B, slots.token_B, NO_TOKEN)),
            window.logp_WB.at[count + 1].set(jnp.where(drawing_B, slots.logp_B, 0.0)),
            slots.active_B,
        )
        return count + 1, slots, window

    _, slots, window = lax.while_loop(more, step, (jnp.int32(0), slots, window))
    return slots._replace(cache=_restore(whole, slots.cache)), window


def _step(layers: list[Params], params: Params, slots: Slots, *, shape: Shape) -> Slots:
    """One token in every active slot."""
    hidden_BD, cache = models.decode(
        layers,
        params,
        shape.config,
        slots.token_B,
        slots.cached_B,
        slots.cache,
        dtype=shape.dtype,
        attention=shape.attention,
        pipeline=shape.pipeline,
    )
    token_B, logp_B = _draw(models.logits(params, shape.config, hidden_BD), slots.drawn_B, slots, shape=shape)
    active_B = slots.active_B
    drawn_B = slots.drawn_B + active_B
    return slots._replace(
        # The cache of a slot that is not active takes a token that nobody reads: the next
        # insertion overwrites it or the mask of later positions hides it.
        cache=cache,
        token_B=jnp.where(active_B, token_B, slots.token_B),
        logp_B=jnp.where(active_B, logp_B, slots.logp_B),
        cached_B=slots.cached_B + active_B,
        drawn_B=drawn_B,
        active_B=active_B & ~_ended(token_B, drawn_B, shape=shape),
    )


def _draw(logits_BV: Array, position_B: Array, of: Slots | Insertion, *, shape: Shape) -> Sampled:
    uniform_B2 = uniforms(of.seed_B, of.request_B, position_B)
    return sample(logits_BV, uniform_B2, position_B, of.settings, stop_tokens=shape.stop_tokens)


def _ended(token_B: Int[Array, "B"], drawn_B: Int[Array, "B"], *, shape: Shape) -> Bool[Array, "B"]:
    """Whether a response ends with this token, its `drawn`-th."""
    stop_1N = jnp.array(shape.stop_tokens, jnp.int32)[None, :]
    return (token_B[:, None] == stop_1N).any(axis=-1) | (drawn_B >= shape.max_response_tokens)


def _shorten(cache: Cache, capacity: int) -> Cache:
    """The first `capacity` positions."""
    return [models.LayerCache(key[..., :capacity], value[..., :capacity, :]) for key, value in cache]


def _restore(whole: Cache, part: Cache) -> Cache:
    """`whole` with its first positions replaced."""
    if whole[0].key_BKHS.shape == part[0].key_BKHS.shape:
        return part
    capacity = part[0].key_BKHS.shape[-1]
    return [
        models.LayerCache(
            old.key_BKHS.at[..., :capacity].set(new.key_BKHS), old.value_BKSH.at[..., :capacity, :].set(new.value_BKSH)
        )
        for old, new in zip(whole, part, strict=True)
    ]
