"""Verification: one forward pass over the newest token and the drafted tokens of every slot, which samples after each.

Sampled tokens have the same distribution with drafts as without, and are the same tokens up to the rounding of float
sums. A sampled token is a function of the logits, the settings of its slot, and random numbers of (seed, request,
position). After the newest token the logits are the logits without a draft, so the first sampled token is the token
without a draft. If this token equals the first drafted token, the logits after the drafted token are the logits after
the sampled token, and so on. All tokens up to the first that differs from the draft are therefore taken, and this first
one too. No rejection sampling is needed: it would correct for a draft that decides on the sample, but here the draft
only decides how many samples of one forward pass are used.

Keys and values of rejected tokens stay in the cache after the newest token. No later token sees them, because masks
follow the positions of tokens, and the next tokens overwrite them. States of linear attention are computed twice: over
all tokens for the logits, and again from the states before, over the tokens that were taken.

Source: Leviathan et al. 2023 (speculative decoding, arXiv:2211.17192), section 2, for the verification in one pass.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Int

from jaxrlhf import models
from jaxrlhf.batch import Array, Params
from jaxrlhf.engine.buckets import Shape
from jaxrlhf.engine.programs import NO_TOKEN, Cache, Slots, Window, draft, ended, run_mtp, run_tokens, sample_tokens
from jaxrlhf.models.attention.linear_attention import Unsettled
from jaxrlhf.models.config import ModelConfig


def verify(
    layers: list[Params],
    params: Params,
    cache: Cache,
    slots: Slots,
    draft_BD: Int[Array, "B D"],
    *,
    shape: Shape,
) -> tuple[Cache, Slots, Window]:
    """Sample 1 to D + 1 tokens in every active slot, with one forward pass over D + 1 tokens of every slot.

    Args:
      layers, params, cache, slots: Arguments of `decode`; cache and slots are to be donated.
      draft_BD: Drafted tokens that may follow the newest token of each slot; `NO_TOKEN` is padding.
    """
    count, width = len(slots.token_B), draft_BD.shape[1] + 1
    given_BT = jnp.concatenate([slots.token_B[:, None], jnp.maximum(draft_BD, 0)], axis=1)
    cache, output = run_tokens(layers, params, cache, slots, given_BT, shape=shape)
    of = jax.tree.map(partial(jnp.repeat, repeats=width, axis=0), slots)  # one row for each token
    position_BT = slots.sampled_B[:, None] + jnp.arange(width, dtype=jnp.int32)[None]
    hidden_RD = output.hidden_BD.reshape(count * width, -1)
    logits_RV = models.padded_logits(params, shape.config, hidden_RD)
    sampled = sample_tokens(logits_RV, position_BT.reshape(-1), of, None, shape)
    ended_R = ended(sampled.token_B, position_BT.reshape(-1) + 1, of)

    def by_slot(leaf_R: Array) -> Array:
        return leaf_R.reshape(count, width, *leaf_R.shape[1:])

    token_BT, logp_BT, ended_BT = map(by_slot, (sampled.token_B, sampled.logp_B, ended_R))
    continues_BD = (token_BT[:, :-1] == draft_BD) & ~ended_BT[:, :-1]
    before_BT = jnp.pad(continues_BD, ((0, 0), (1, 0)), constant_values=True)
    taken_BT = jnp.cumprod(before_BT, axis=1).astype(bool) & slots.active_B[:, None]
    taken_B = taken_BT.sum(axis=1, dtype=jnp.int32)
    cache = _settled(cache, taken_B, shape)

    def newest(leaf_BT: Array, old_B: Array) -> Array:
        at_B = jnp.maximum(taken_B - 1, 0).reshape(count, *[1] * (leaf_BT.ndim - 1))
        new_B = jnp.take_along_axis(leaf_BT, at_B, axis=1)[:, 0]
        return jnp.where(slots.active_B.reshape(count, *[1] * (new_B.ndim - 1)), new_B, old_B)

    def window(first_B: Array, leaf_BT: Array, padding: float) -> Array:
        mask_BT = taken_BT.reshape(count, width, *[1] * (leaf_BT.ndim - 2))
        leaf_BT = jnp.where(mask_BT, leaf_BT, jnp.asarray(padding, leaf_BT.dtype))
        return jnp.concatenate([first_B[None], jnp.swapaxes(leaf_BT, 0, 1)])

    cache, further_BTD = run_mtp(params, cache, slots, output.hidden_BD, token_BT, shape=shape)
    kept_BTK: Any = None if sampled.kept_BK is None else by_slot(sampled.kept_BK)
    choice_BTLk: Any = output.choice_BLk
    old_kept_BK: Any = slots.kept_BK
    read = Window(
        window(slots.token_B, token_BT, NO_TOKEN),
        window(slots.logp_B, logp_BT, 0.0),
        slots.active_B & ~newest(ended_BT, slots.active_B),
        jnp.swapaxes(choice_BTLk, 0, 1) if shape.records_routing else None,
        None if kept_BTK is None else window(old_kept_BK, kept_BTK, -1),
    )
    slots = slots._replace(
        token_B=newest(token_BT, slots.token_B),
        logp_B=newest(logp_BT, slots.logp_B),
        cached_B=slots.cached_B + taken_B,
        sampled_B=slots.sampled_B + taken_B,
        active_B=read.active_B,
        kept_BK=old_kept_BK if kept_BTK is None else newest(kept_BTK, old_kept_BK),
    )
    further_BD = None if further_BTD is None else newest(further_BTD, jnp.zeros_like(further_BTD[:, 0]))
    cache, drafted_BD = draft(params, cache, slots, further_BD, shape=shape)
    return cache, slots, read._replace(drafted_BD=drafted_BD)


def _settled(cache: Any, taken_B: Array, shape: Shape) -> Any:
    """Advance the states of linear attention by the tokens that were taken."""
    if not isinstance(shape.config, ModelConfig) or shape.config.linear is None:
        return cache
    linear = shape.config.linear
    return [layer.settled(linear, taken_B) if isinstance(layer, Unsettled) else layer for layer in cache]
