"""Rings: caches of layers with a window, which keep the newest positions of a slot and no more.

A slot has R entries, and position p is in entry p mod R. R is the window, and as many more as the newest position may
be ahead of a prompt that goes on from what is there.
"""

import jax.numpy as jnp
from jaxtyping import Bool, Float, Int

from jaxrlhf.batch import Array
from jaxrlhf.models.attention.interleaved import place_of
from jaxrlhf.models.attention.score_mod import ScoreMod
from jaxrlhf.models.config import LENDERS, LINEAR_LAYERS, ModelConfig

NOWHERE = 2**30
"""Past every position: nothing is written there."""


def windowed_layers(config: ModelConfig, *, stages: int = 1) -> list[bool]:
    """The layers of a stage that keep something, in order: true where those of every stage have the window."""
    stack_of, flags = config.pattern.stack_of(), config.sliding_layers or (True,) * config.num_layers
    if config.sliding_window is None or config.latent is not None:
        flags = (False,) * config.num_layers
    slides = [flag and name != LINEAR_LAYERS for name, flag in zip(stack_of, flags, strict=True)]
    each = config.num_layers // stages
    return [all(slides[place::each]) for place in range(each) if stack_of[place] not in LENDERS]


def windowed_share(config: ModelConfig, *, stages: int = 1) -> float:
    """Share of the numbers of a token, in the caches of all layers, that those with a window keep."""
    names = [name for name in config.pattern.stack_of() if name not in LENDERS]
    kept = [layer.num_kv_heads * layer.head_dim for layer in map(config.of_stack, names)]
    kept = [0 if name == LINEAR_LAYERS else width for name, width in zip(names, kept, strict=True)]
    slides = windowed_layers(config, stages=stages) * stages
    return sum(width for width, flag in zip(kept, slides, strict=True) if flag) / sum(kept)


def seen_in_ring(position_B: Int[Array, "B"], entries: int, score_mod: ScoreMod) -> Bool[Array, "B R"]:
    """True for the entries of a ring that the newest position of each slot sees."""
    ago_BR = jnp.mod(position_B[:, None] - jnp.arange(entries)[None], entries)
    return score_mod.in_window(ago_BR) & (ago_BR <= position_B[:, None])


def ring_of_prompts(
    leaf_PWKH: Float[Array, "P W K H"], row_I: Int[Array, "I"], length_P: Int[Array, "P"], *, entries: int, ways: int
) -> Float[Array, "I R K H"]:
    """The newest positions of prompt `row_I[i]`, for each i, in the order of a ring.

    Args:
      ways: Devices that share the positions of the prompts.
    """
    newest_I1 = length_P[row_I][:, None] - 1
    # Entries that hold nothing get the first position; no window reaches them.
    place_IR = newest_I1 - jnp.mod(newest_I1 - jnp.arange(entries)[None], entries)
    return leaf_PWKH[row_I[:, None], place_of(jnp.maximum(place_IR, 0), leaf_PWKH.shape[1], ways)]


def prompts_of_ring(leaf_PRKH: Float[Array, "P R K H"], *, width: int) -> Float[Array, "P W K H"]:
    """The first `width` positions as far as rings have them; what is in the place of others no window reaches."""
    return leaf_PRKH[:, jnp.arange(width) % leaf_PRKH.shape[1]]
