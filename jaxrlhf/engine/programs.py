"""Programs of the engine: prefill, insert and decode as pure functions of their state.

`Engine` compiles these functions. Every slot is computed at every step; an inactive slot samples nothing and keeps its
state. The shapes of the arrays say how many slots there are, and how many tokens their cache holds. Programs of the
cache alone are in `cache/cache_programs.py`.
"""

from dataclasses import dataclass
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
from jaxrlhf.models.attention.kv_cache import LayerCache
from jaxrlhf.models.attention.linear_attention import LayerState
from jaxrlhf.models.attention.pages import PagedCache
from jaxrlhf.models.config import ModelConfig
from jaxrlhf.models.mtp.layer import mtp_input, mtp_normed, mtp_slots

NO_TOKEN = -1

MTP_TOKENS = 3
"""Number of tokens that the layer for the second next token drafts; each is less likely than the one before it."""

CachedLayer = LayerCache | LayerState
Cache = list[CachedLayer] | PagedCache


class Prompts(NamedTuple):
    """Prefilled prompts: the hidden states that predict their first response tokens, and their keys and values.

    Attributes:
      choice_PSLk: int16, experts of the prompts' tokens; None if not recorded.
      offset_P: int32, difference between positions and token indices after the images; None for models without M-RoPE.
    """

    hidden_PD: Array
    prefix: models.Prefix
    length_P: Array
    choice_PSLk: Array | None = None
    offset_P: Array | None = None


@dataclass(frozen=True)
class Prefilled:
    """Prefilled prompts with their tokens, ready to be inserted any number of times.

    Attributes:
      version: Version of the weights that ran the prompts.
      first: First position of each prompt that rings hold; empty for held responses.
    """

    prompts: Prompts
    tokens: tuple[tuple[int, ...], ...]
    version: int
    first: tuple[int, ...] = ()


class Insertion(NamedTuple):
    """Insertion of I responses: prompt rows and target rows, sampling keys and settings, and end conditions.

    A target past the last row is skipped, so that one program serves any number of responses up to I.

    Attributes:
      row_I: Row of each prompt in its prefill.
      target_I: Row of each response in `Slots` and in the cache.
      sampled_B: Number of response tokens at the end of the prompt, sampled earlier.
      limit_B: Maximum number of response tokens, including `sampled_B`.
      stop_BE: Stop token ids; the rest is negative.
      bits_BU: Masks of `SlotConstraints.start`; None constrains no response.
    """

    row_I: Array
    target_I: Array
    seed_B: Array
    request_B: Array
    sampled_B: Array
    limit_B: Array
    stop_BE: Array
    settings: SlotSampling
    bits_BU: Array | None = None


class Slots(NamedTuple):
    """State of B slots without the KV cache, which holds the tokens before the newest.

    Attributes:
      token_B: Newest token, not in the cache yet.
      kept_BK: Sampling mask of the newest token, as in `Sampled`.
      cached_B: Number of cached tokens, which is the index of the newest token.
      sampled_B: Number of response tokens, the newest included.
      active_B: True if the response continues.
      seed_B, request_B, limit_B, stop_BE, settings: Values of the slot's `Insertion`.
      offset_B: `offset_P` of the slot's prompt.
    """

    token_B: Array
    logp_B: Array
    cached_B: Array
    sampled_B: Array
    active_B: Array
    seed_B: Array
    request_B: Array
    limit_B: Array
    stop_BE: Array
    settings: SlotSampling
    offset_B: Array | None = None
    kept_BK: Array | None = None


class Window(NamedTuple):
    """Tokens sampled by one `decode`: row 0 is each slot's newest token at the start, the other rows are new.

    Attributes:
      token_WB: int32; `NO_TOKEN` where a slot sampled nothing.
      active_B: True if the response continues.
      choice_WBLk: int16, experts of each token that was run to sample the next; None if not recorded.
      kept_WBK: Sampling mask of each token, as in `Sampled`.
      drafted_BD: Tokens that may follow the newest token; None if the model drafts none.
    """

    token_WB: Array
    logp_WB: Array
    active_B: Array
    choice_WBLk: Array | None = None
    kept_WBK: Array | None = None
    drafted_BD: Array | None = None


def empty_slots(*, slots: int, shape: Shape) -> Slots:
    """Create the state of inactive slots."""
    return Slots(
        token_B=jnp.zeros(slots, jnp.int32),
        logp_B=jnp.zeros(slots, jnp.float32),
        cached_B=jnp.zeros(slots, jnp.int32),
        sampled_B=jnp.zeros(slots, jnp.int32),
        active_B=jnp.zeros(slots, bool),
        seed_B=jnp.zeros(slots, jnp.uint32),
        request_B=jnp.zeros(slots, jnp.uint32),
        limit_B=jnp.zeros(slots, jnp.int32),
        stop_BE=jnp.full((slots, shape.most_stop_tokens), -1, jnp.int32),
        settings=jax.tree.map(jnp.asarray, settings_of([Sampling()] * slots)),
        offset_B=jnp.zeros(slots, jnp.int32) if shape.has_mrope else None,
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
    """Prefill prompts; any number of responses can start from the result.

    Args:
      layers: Unstacked layers from `unstack`; None reads the stacked layers of `params`.
      past: Cached prefixes of the prompts.
      chunk_tokens: Number of tokens of a chunk, for `models.prefill`. A user-defined model may run prompts whole.
    """
    how: dict[str, Any] = {"layers": layers, "chunk_tokens": chunk_tokens, "execution": shape.execution}
    how |= {name: each for name, each in (("past", past), ("images", images)) if each is not None}
    output = models.prefill(params, shape.config, token_PS, length_P, **how)
    offset_P = jnp.zeros_like(length_P) if shape.has_mrope else None
    if images is not None and shape.has_mrope:
        offset_P = images.mrope_position_RW3.max(axis=(1, 2)) + 1 - length_P
    choice_PSLk = output.choice_PSLk if shape.records_routing else None
    return Prompts(output.hidden_PD, output.prefix, length_P, choice_PSLk, offset_P)


def insert(params: Params, slots: Slots, prompts: Prompts, insertion: Insertion, *, shape: Shape) -> Slots:
    """Start responses: sample their first tokens. `place` copies each prompt's cache into its row."""
    row_I, offset_P = insertion.row_I, prompts.offset_P
    logits_IV = models.padded_logits(params, shape.config, prompts.hidden_PD)[row_I]
    token_I, logp_I, kept_IK = sample_tokens(logits_IV, insertion.sampled_B, insertion, insertion.bits_BU, shape)
    sampled_I = insertion.sampled_B + 1
    new = Slots(
        token_I,
        logp_I,
        prompts.length_P[row_I],
        sampled_I,
        ~ended(token_I, sampled_I, insertion),
        insertion.seed_B,
        insertion.request_B,
        insertion.limit_B,
        insertion.stop_BE,
        insertion.settings,
        None if offset_P is None else offset_P[row_I],
        kept_IK,
    )
    return jax.tree.map(lambda stored_B, new_I: stored_B.at[insertion.target_I].set(new_I, mode="drop"), slots, new)


def keep_rows(slots: Slots, row_GB: Array, continues_GB: Array, *, shape: Shape) -> Slots:
    """Gather slot rows, fewer or more than before; rows with False in `continues_GB` become inactive."""
    slots = jax.tree.map(lambda leaf: take_rows(leaf, row_GB), slots)
    return slots._replace(active_B=slots.active_B & jnp.ravel(continues_GB))


def take_rows(leaf: jax.Array, row_GB: Array) -> jax.Array:
    """Gather rows of each of G equal parts, which may be on different devices."""
    parts = leaf.reshape(len(row_GB), -1, *leaf.shape[1:])
    return jax.vmap(lambda part, row_B: part[row_B])(parts, row_GB).reshape(-1, *leaf.shape[1:])


def unstack(params: Params, *, shape: Shape) -> list[Params]:
    """Unstack the layers for `decode`; slices of the stack inside its loop would be copied at every token."""
    return models.unstack_layers(params, shape.config, execution=shape.execution)


def decode(
    layers: list[Params],
    params: Params,
    cache: Cache,
    slots: Slots,
    bits_BU: Array | None = None,
    most: Array | None = None,
    *,
    shape: Shape,
) -> tuple[Cache, Slots, Window]:
    """Sample up to `tokens_per_dispatch` tokens in every active slot; stop early when no slot is active.

    Args:
      layers: Unstacked layers from `unstack`, made once for all calls.
      cache: KV cache, to be donated. Active slots must not outgrow the cache or their pages.
      slots: State of the slots, to be donated.
      bits_BU: Masks of `SlotConstraints.next`, and one token is sampled; None constrains no response.
      most: Maximum number of tokens of this call; None is `tokens_per_dispatch`.
    """
    width, count, kept_BK = shape.tokens_per_dispatch, len(slots.token_B), slots.kept_BK
    width = width if bits_BU is None else 1
    end = width if most is None else jnp.minimum(most, width)
    window = Window(
        jnp.full((width + 1, count), NO_TOKEN, jnp.int32).at[0].set(slots.token_B),
        jnp.zeros((width + 1, count), jnp.float32).at[0].set(slots.logp_B),
        slots.active_B,
        jnp.zeros((width, count, *_routed(shape).routed_choices), jnp.int16) if shape.records_routing else None,
        None if kept_BK is None else jnp.full((width + 1, *kept_BK.shape), -1, jnp.int32).at[0].set(kept_BK),
    )

    def more(carry):
        count, _, _, window, _ = carry
        return (count < end) & window.active_B.any()

    def step(carry):
        count, cache, slots, window, _ = carry
        active_B = slots.active_B
        cache, slots, choice_BLk, further_BD = _step(layers, params, cache, slots, bits_BU, shape=shape)
        choice_WBLk, kept_WBK = window.choice_WBLk, window.kept_WBK
        window = Window(
            window.token_WB.at[count + 1].set(jnp.where(active_B, slots.token_B, NO_TOKEN)),
            window.logp_WB.at[count + 1].set(jnp.where(active_B, slots.logp_B, 0.0)),
            slots.active_B,
            None if choice_WBLk is None else choice_WBLk.at[count].set(choice_BLk),
            None if kept_WBK is None else kept_WBK.at[count + 1].set(slots.kept_BK),
        )
        return count + 1, cache, slots, window, further_BD

    further_BD: Any = None
    if shape.execution.mtp_slots:
        further_BD = jnp.zeros((count, shape.config.hidden_size), shape.execution.dtype)
    start_state = jnp.int32(0), cache, slots, window, further_BD
    _, cache, slots, window, further_BD = lax.while_loop(more, step, start_state)
    cache, drafted_BD = draft(params, cache, slots, further_BD, shape=shape)
    return cache, slots, window._replace(drafted_BD=drafted_BD)


def _step(
    layers: list[Params], params: Params, cache: Cache, slots: Slots, bits_BU: Array | None, *, shape: Shape
) -> tuple[Cache, Slots, Array | None, Array | None]:
    """Sample one token in every active slot.

    Returns:
      Cache and slots; the experts of the token that was run, if recorded; the result of `run_mtp`.
    """
    cache, output = run_tokens(layers, params, cache, slots, slots.token_B, shape=shape)
    logits_BV = models.padded_logits(params, shape.config, output.hidden_BD)
    token_B, logp_B, kept_BK = sample_tokens(logits_BV, slots.sampled_B, slots, bits_BU, shape)
    cache, further_BD = run_mtp(params, cache, slots, output.hidden_BD, token_B, shape=shape)
    active_B = slots.active_B
    sampled_B = slots.sampled_B + active_B
    # An inactive slot also wrote a token to its cache, which nobody reads: the next insertion overwrites the entry, or
    # the mask of later positions hides it. Without a page for the entry, the write is dropped.
    slots = slots._replace(
        token_B=jnp.where(active_B, token_B, slots.token_B),
        logp_B=jnp.where(active_B, logp_B, slots.logp_B),
        cached_B=slots.cached_B + active_B,
        sampled_B=sampled_B,
        active_B=active_B & ~ended(token_B, sampled_B, slots),
        kept_BK=kept_BK,
    )
    return cache, slots, output.choice_BLk if shape.records_routing else None, further_BD


def run_tokens(
    layers: list[Params], params: Params, cache: Cache, slots: Slots, token_B: Array, *, shape: Shape
) -> tuple[Any, models.DecodeOutput]:
    """Run the newest token of every slot, or several tokens that may follow it, `[B, T]`, the newest included.

    Returns:
      The cache, in which states are `Unsettled` after several tokens, and the output of `models.decode`.
    """
    how = {"execution": shape.execution} | ({"offset_B": slots.offset_B} if shape.has_mrope else {})
    layers_of_cache = cache.split() if isinstance(cache, PagedCache) else cache
    own = [*layers_of_cache][len(layers) :]  # of the layer that predicts the second next token
    output = models.decode(layers, params, shape.config, token_B, slots.cached_B, layers_of_cache, **how)
    written: Any = [*output.cache, *own] if shape.execution.mtp_slots else output.cache
    return cache.joined(written) if isinstance(cache, PagedCache) else written, output


def run_mtp(
    params: Params, cache: Any, slots: Slots, hidden_BD: Array, next_B: Array, *, shape: Shape
) -> tuple[Any, Any]:
    """Run the layer that predicts the second next token over the tokens that were run, `[B]` or `[B, T]`.

    Args:
      slots: Slots before the tokens were run.
      hidden_BD: Hidden states of these tokens.
      next_B: Token after each of them.

    Returns:
      The cache, and the layer's output; None if no token is drafted.
    """
    if not shape.execution.mtp_slots:
        return cache, None
    assert isinstance(shape.config, ModelConfig), "only the decoder has such a layer"
    *others, stored = cache
    next_BT = next_B.reshape(len(next_B), -1)
    given = hidden_BD.reshape(*next_BT.shape, -1), next_BT, slots.cached_B, stored
    further_BTD, written = mtp_slots(params, shape.config, *given, shape.execution)
    return [*others, written], further_BTD.reshape(hidden_BD.shape)


def draft(params: Params, cache: Any, slots: Slots, further_BD: Any, *, shape: Shape) -> tuple[Any, Array | None]:
    """Draft tokens after the newest token of every slot, sampled with the random numbers of their positions.

    A draft is the token that is sampled later, where the layer predicts the distribution that the model will have.
    Drafts leave entries in the layer's cache, which the next tokens overwrite.

    Args:
      further_BD: Result of `run_mtp` at the token before the newest.
    """
    if further_BD is None or len(further_BD) > shape.execution.mtp_slots:
        return cache, None
    drafted: list[Array] = []
    assert isinstance(shape.config, ModelConfig), "only the decoder has such a layer"
    for place in range(MTP_TOKENS):
        if drafted:
            read_BD = mtp_input(params, shape.config, further_BD)
            cache, further_BD = run_mtp(params, cache, slots, read_BD, drafted[-1], shape=shape)
            slots = slots._replace(cached_B=slots.cached_B + 1)
        logits_BV = models.padded_logits(params, shape.config, mtp_normed(params, shape.config, further_BD))
        drafted.append(sample_tokens(logits_BV, slots.sampled_B + place, slots, None, shape).token_B)
    return cache, jnp.stack(drafted, axis=1)


def _routed(shape: Shape) -> ModelConfig:
    assert isinstance(shape.config, ModelConfig), "only the decoder has experts"
    return shape.config


def sample_tokens(
    logits_BV: Array, position_B: Array, of: Slots | Insertion, bits_BU: Array | None, shape: Shape
) -> Sampled:
    """Sample a token of each slot, with the random numbers of its position; see `sample`."""
    uniform_B2 = uniforms(of.seed_B, of.request_B, position_B)
    how: dict[str, Any] = {"stop_BE": of.stop_BE, "bits_BU": bits_BU, "most_kept": shape.most_kept}
    return sample(logits_BV, uniform_B2, position_B, of.settings, **how)


def ended(token_B: Array, sampled_B: Array, of: Slots | Insertion) -> Bool[Array, "B"]:
    """Return True for responses that end with a token, or at their limit of `sampled_B` tokens."""
    return (token_B[:, None] == of.stop_BE).any(axis=1) | (sampled_B >= of.limit_B)
