"""Programs of the engine: prefill, insert and decode as pure functions of their state.

`Engine` compiles them. Every slot is computed at every step; a slot that is not active draws
nothing and keeps its state. How many slots there are, and how many tokens their cache holds, is
what the arrays say; what changes either works on one layer of the cache at a time, so that
little exists twice.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Bool, Int

from jaxrlhf import models
from jaxrlhf.batch import Array, Params
from jaxrlhf.config import Sampling
from jaxrlhf.engine.buckets import Shape
from jaxrlhf.engine.sampling import Sampled, SlotSampling, sample, settings_of, uniforms
from jaxrlhf.models.attention.interleaved import resized
from jaxrlhf.models.attention.kv_cache import LayerCache, SlidingCache, is_ring, keeps_of
from jaxrlhf.models.attention.linear_attention import LayerState
from jaxrlhf.models.attention.pages import PagedCache, insert_pages, take_pages
from jaxrlhf.models.attention.pages import empty_pages as pages_of_layers
from jaxrlhf.models.config import ModelConfig

NO_TOKEN = -1

CachedLayer = LayerCache | LayerState
Cache = list[CachedLayer] | PagedCache


class Prompts(NamedTuple):
    """Prefilled prompts: what predicts each one's first response token, and its keys and values.

    Attributes:
      choice_PSLk: int16, the experts that their tokens went through; None if not recorded.
      offset_P: int32 difference of positions and indices behind their images; None of a model that counts tokens.
    """

    hidden_PD: Array
    prefix: models.Prefix
    length_P: Array
    choice_PSLk: Array | None = None
    offset_P: Array | None = None


@dataclass(frozen=True)
class Prefilled:
    """Prompts that were run, ready to be inserted any number of times.

    Attributes:
      version: Version of the weights that ran them.
      first: Position of each from which on rings have its keys and values; none of responses that were held.
    """

    prompts: Prompts
    tokens: tuple[tuple[int, ...], ...]
    version: int
    first: tuple[int, ...] = ()


class Insertion(NamedTuple):
    """I responses to start: which prompt row goes into which slot, what the draws depend on, and what ends them.

    A slot past the last is skipped, so that one program serves any number up to I.

    Attributes:
      drawn_B: Tokens of the response that were drawn before and end its prompt.
      limit_B: Most tokens of the response, those included.
      stop_BE: Ids that end it; the rest are negative.
    """

    row_I: Array
    slot_I: Array
    seed_B: Array
    request_B: Array
    drawn_B: Array
    limit_B: Array
    stop_BE: Array
    settings: SlotSampling


class Slots(NamedTuple):
    """The state of B slots, but for the cache, which holds the tokens before the newest.

    Attributes:
      token_B: The newest token, which is not in the cache yet.
      kept_BK: Tokens that it was drawn among, as in `Sampled`.
      cached_B: Tokens in the cache, so the newest token's position.
      drawn_B: Tokens of the response, the newest included.
      active_B: Whether the response goes on.
      seed_B, request_B, limit_B, stop_BE, settings: Its `Insertion`.
      offset_B: Its prompt's `offset_P`.
    """

    token_B: Array
    logp_B: Array
    cached_B: Array
    drawn_B: Array
    active_B: Array
    seed_B: Array
    request_B: Array
    limit_B: Array
    stop_BE: Array
    settings: SlotSampling
    offset_B: Array | None = None
    kept_BK: Array | None = None


class Window(NamedTuple):
    """Tokens that one `decode` drew: row 0 is each slot's newest token at the start, the others follow.

    Attributes:
      token_WB: int32; `NO_TOKEN` where a slot drew nothing.
      active_B: Whether the response goes on.
      choice_WBLk: int16, the experts that the token went through to draw the next one; None if not recorded.
      kept_WBK: Tokens that each was drawn among, as in `Sampled`.
    """

    token_WB: Array
    logp_WB: Array
    active_B: Array
    choice_WBLk: Array | None = None
    kept_WBK: Array | None = None


def empty_cache(*, slots: int, capacity: int, shape: Shape) -> list[CachedLayer]:
    """A cache that nothing was written to."""
    return models.empty_cache(shape.config, slots=slots, capacity=capacity, execution=shape.execution)


def empty_pages(*, pages: int, shape: Shape) -> list[Array]:
    """So many pages for every layer, in all replicas together."""
    assert isinstance(shape.config, ModelConfig), "no other model's cache lies in pages"
    return pages_of_layers(shape.config, pages=pages, execution=shape.execution)


def empty_slots(*, slots: int, shape: Shape) -> Slots:
    """Slots none of which is active."""
    return Slots(
        token_B=jnp.zeros(slots, jnp.int32),
        logp_B=jnp.zeros(slots, jnp.float32),
        cached_B=jnp.zeros(slots, jnp.int32),
        drawn_B=jnp.zeros(slots, jnp.int32),
        active_B=jnp.zeros(slots, bool),
        seed_B=jnp.zeros(slots, jnp.uint32),
        request_B=jnp.zeros(slots, jnp.uint32),
        limit_B=jnp.zeros(slots, jnp.int32),
        stop_BE=jnp.full((slots, shape.most_stop_tokens), -1, jnp.int32),
        settings=jax.tree.map(jnp.asarray, settings_of([Sampling()] * slots)),
        offset_B=jnp.zeros(slots, jnp.int32) if shape.counts_apart else None,
        kept_BK=jnp.full((slots, shape.most_kept), -1, jnp.int32) if shape.most_kept else None,
    )


def prefill(
    params: Params,
    layers: list[Params] | None,
    token_PS: Int[Array, "P S"],
    length_P: Int[Array, "P"],
    past: models.Past | None = None,
    images: models.ImageRows | None = None,
    *,
    chunk_tokens: int | None = None,
    shape: Shape,
) -> Prompts:
    """Run prompts once; their responses, however many, start from the result.

    Args:
      layers: From `unstack`; None reads those of `params`.
      past: Beginnings of the prompts that were run before.
      chunk_tokens: Tokens of a chunk, for `models.prefill`. A model of one's own may run prompts whole all the same.
    """
    how: dict[str, Any] = {"layers": layers, "chunk_tokens": chunk_tokens, "execution": shape.execution}
    how |= {name: each for name, each in (("past", past), ("images", images)) if each is not None}
    output = models.prefill(params, shape.config, token_PS, length_P, **how)
    offset_P = jnp.zeros_like(length_P) if shape.counts_apart else None
    if images is not None and shape.counts_apart:
        offset_P = images.turn_RW3.max(axis=(1, 2)) + 1 - length_P
    choice_PSLk = output.choice_PSLk if shape.records_routing else None
    return Prompts(output.hidden_PD, output.prefix, length_P, choice_PSLk, offset_P)


def insert(params: Params, slots: Slots, prompts: Prompts, insertion: Insertion, *, shape: Shape) -> Slots:
    """Start responses: draw their first tokens. `place` copies each prompt's cache into its slot."""
    row_I, offset_P = insertion.row_I, prompts.offset_P
    logits_IV = models.padded_logits(params, shape.config, prompts.hidden_PD)[row_I]
    token_I, logp_I, kept_IK = _draw(logits_IV, insertion.drawn_B, insertion, shape)
    drawn_I = insertion.drawn_B + 1
    state = token_I, logp_I, prompts.length_P[row_I], drawn_I, ~_ended(token_I, drawn_I, insertion)
    return seated(slots, insertion, *state, None if offset_P is None else offset_P[row_I], kept_IK)


def seated(
    slots: Slots, insertion: Insertion, token: Any, logp: Any, cached: Any, drawn: Any, active: Any, *last: Any
) -> Slots:
    """Slots of which some have responses of an insertion, in this state; `last` are `offset_B` and `kept_BK`."""
    asked = insertion.seed_B, insertion.request_B, insertion.limit_B, insertion.stop_BE, insertion.settings
    new = Slots(token, logp, cached, drawn, active, *asked, *last)
    return jax.tree.map(lambda stored_B, new_I: stored_B.at[insertion.slot_I].set(new_I, mode="drop"), slots, new)


def place(
    stored: CachedLayer, prompts: Prompts, layer: Array, row_I: Array, slot_I: Array, *, shape: Shape
) -> CachedLayer:
    """Copy a layer (with stages: of every stage) of prompt `row_I[i]` into slot `slot_I[i]`, for each i.

    Args:
      layer: Index among the layers that keep what this one does.
    """

    def of_layer(leaf_LPSKH: Array) -> Array:
        stages = shape.execution.stages
        by_stage = leaf_LPSKH.reshape(stages, len(leaf_LPSKH) // stages, *leaf_LPSKH.shape[1:])
        return lax.dynamic_index_in_dim(by_stage, layer, axis=1, keepdims=False)

    prefix = prompts.prefix.mapped(of_layer, keeps_of(stored))
    return models.insert_prefix([stored], prefix, row_I, slot_I, prompts.length_P, execution=shape.execution)[0]


def take_prefix(cache: list[models.LayerCache], row_P: Array, *, width: int, shape: Shape) -> models.Prefix:
    """The first `width` positions of some rows of the cache, as a prefill leaves them; zeros past the capacity."""
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
    """The first `width` entries of prompts whose pages are `page_GPQ[g, p]` in replica g, as a prefill leaves them."""
    assert isinstance(shape.config, ModelConfig), "no other model's cache lies in pages"
    head_dim, execution = shape.config.head_dim, shape.execution
    taken = [take_pages(pages, page_GPQ, width=width, head_dim=head_dim, execution=execution) for pages in layers]
    keys, values = map(jnp.stack, zip(*taken, strict=True))
    return models.Prefix(keys, values)


def resize(stored: CachedLayer, row_GB: Array | None, *, capacity: int, shape: Shape) -> CachedLayer:
    """A layer of the cache with another capacity, and of some of its slots only; states and rings keep theirs.

    Args:
      row_GB: Slots to keep of each replica, counted from its first; None keeps all.
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
    """Copy a layer of prompt `row_I[i]` into pages `page_GIQ[g, i]` of replica g, for each i."""
    both = prefix.key_LPSKH, prefix.value_LPSKH
    key_PSKH, value_PSKH = (lax.dynamic_index_in_dim(leaf_LPSKH, layer, keepdims=False) for leaf_LPSKH in both)
    return insert_pages(pages_ZSJU, key_PSKH, value_PSKH, row_I, page_GIQ, execution=shape.execution)


def add_pages(pages_ZSJU: Array, *, pages: int, shape: Shape) -> Array:
    """A layer with so many more pages in each replica."""
    parts_GZSJU = pages_ZSJU.reshape(shape.replicas, -1, *pages_ZSJU.shape[1:])
    parts_GZSJU = jnp.pad(parts_GZSJU, ((0, 0), (0, pages), (0, 0), (0, 0), (0, 0)))
    return parts_GZSJU.reshape(-1, *pages_ZSJU.shape[1:])


def keep_rows(slots: Slots, row_GB: Array, goes_on_GB: Array, *, shape: Shape) -> Slots:
    """The state of other slots than before: fewer of them, or again more, of which those that are new are idle."""
    slots = jax.tree.map(lambda leaf: take_rows(leaf, row_GB), slots)
    return slots._replace(active_B=slots.active_B & jnp.ravel(goes_on_GB))


def take_rows(leaf: jax.Array, row_GB: Array) -> jax.Array:
    """Rows of each of G equal parts, which may lie on different devices."""
    parts = leaf.reshape(len(row_GB), -1, *leaf.shape[1:])
    return jax.vmap(lambda part, row_B: part[row_B])(parts, row_GB).reshape(-1, *leaf.shape[1:])


def unstack(params: Params, *, shape: Shape) -> list[Params]:
    """The layers as `decode` reads them; slices of the stack inside its loop would be copied at every token."""
    return models.unstack_layers(params, shape.config, execution=shape.execution)


def decode(
    layers: list[Params], params: Params, cache: Cache, slots: Slots, *, shape: Shape
) -> tuple[Cache, Slots, Window]:
    """Draw up to `tokens_per_dispatch` tokens in every active slot; stops early when none is left.

    Args:
      layers: From `unstack`, once for all calls.
      cache: Donate it. Active slots must not outgrow it, or their pages.
      slots: Donate it.
    """
    width, count, kept_BK = shape.tokens_per_dispatch, len(slots.token_B), slots.kept_BK
    window = Window(
        jnp.full((width + 1, count), NO_TOKEN, jnp.int32).at[0].set(slots.token_B),
        jnp.zeros((width + 1, count), jnp.float32).at[0].set(slots.logp_B),
        slots.active_B,
        jnp.zeros((width, count, *_routed(shape).routed_choices), jnp.int16) if shape.records_routing else None,
        None if kept_BK is None else jnp.full((width + 1, *kept_BK.shape), -1, jnp.int32).at[0].set(kept_BK),
    )

    def more(carry):
        count, _, _, window = carry
        return (count < width) & window.active_B.any()

    def step(carry):
        count, cache, slots, window = carry
        drawing_B = slots.active_B
        cache, slots, choice_BLk = _step(layers, params, cache, slots, shape=shape)
        choice_WBLk, kept_WBK = window.choice_WBLk, window.kept_WBK
        window = Window(
            window.token_WB.at[count + 1].set(jnp.where(drawing_B, slots.token_B, NO_TOKEN)),
            window.logp_WB.at[count + 1].set(jnp.where(drawing_B, slots.logp_B, 0.0)),
            slots.active_B,
            None if choice_WBLk is None else choice_WBLk.at[count].set(choice_BLk),
            None if kept_WBK is None else kept_WBK.at[count + 1].set(slots.kept_BK),
        )
        return count + 1, cache, slots, window

    _, cache, slots, window = lax.while_loop(more, step, (jnp.int32(0), cache, slots, window))
    return cache, slots, window


def _step(
    layers: list[Params], params: Params, cache: Cache, slots: Slots, *, shape: Shape
) -> tuple[Cache, Slots, Array | None]:
    """One token in every active slot; also the experts that the token before it went through, if recorded."""
    state = slots.token_B, slots.cached_B, cache.split() if isinstance(cache, PagedCache) else cache
    how = {"execution": shape.execution} | ({"offset_B": slots.offset_B} if shape.counts_apart else {})
    output = models.decode(layers, params, shape.config, *state, **how)
    written: Any = output.cache  # layers of this kind of cache
    cache = cache.joined(written) if isinstance(cache, PagedCache) else written
    logits_BV = models.padded_logits(params, shape.config, output.hidden_BD)
    token_B, logp_B, kept_BK = _draw(logits_BV, slots.drawn_B, slots, shape)
    active_B = slots.active_B
    drawn_B = slots.drawn_B + active_B
    # The cache of a slot that is not active took a token that nobody reads: the next insertion
    # overwrites it or the mask of later positions hides it; a slot that has no page for it drops it.
    slots = slots._replace(
        token_B=jnp.where(active_B, token_B, slots.token_B),
        logp_B=jnp.where(active_B, logp_B, slots.logp_B),
        cached_B=slots.cached_B + active_B,
        drawn_B=drawn_B,
        active_B=active_B & ~_ended(token_B, drawn_B, slots),
        kept_BK=kept_BK,
    )
    return cache, slots, output.choice_BLk if shape.records_routing else None


def _routed(shape: Shape) -> ModelConfig:
    assert isinstance(shape.config, ModelConfig), "no other model has experts"
    return shape.config


def _draw(logits_BV: Array, position_B: Array, of: Slots | Insertion, shape: Shape) -> Sampled:
    uniform_B2 = uniforms(of.seed_B, of.request_B, position_B)
    return sample(logits_BV, uniform_B2, position_B, of.settings, stop_BE=of.stop_BE, most_kept=shape.most_kept)


def _ended(token_B: Array, drawn_B: Array, of: Slots | Insertion) -> Bool[Array, "B"]:
    return (token_B[:, None] == of.stop_BE).any(axis=1) | (drawn_B >= of.limit_B)
