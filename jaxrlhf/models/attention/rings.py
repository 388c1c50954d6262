"""Ring caches of layers with a window: a slot keeps only its newest positions.

A slot has R entries, and position p is in entry p mod R. R is the window plus the largest number of positions by which
the newest position may be past the end of a prompt that continues from the ring.
"""

import jax.numpy as jnp
from jaxtyping import Bool, Float, Int

from jaxrlhf.batch import Array
from jaxrlhf.models.attention.interleaved import place_of
from jaxrlhf.models.attention.score_mod import ScoreMod
from jaxrlhf.models.config import LENDERS, LINEAR_LAYERS, ModelConfig

NOWHERE = 2**30
"""Position past every cache: writes to it are skipped."""


def windowed_layers(config: ModelConfig, *, stages: int = 1) -> list[bool]:
    """Return a flag for each layer of a stage that keeps a cache: true if this layer has the window in every stage."""
    stack_of, flags = config.pattern.stack_of(), config.sliding_layers or (True,) * config.num_layers
    if config.sliding_window is None or config.latent is not None:
        flags = (False,) * config.num_layers
    slides = [flag and name != LINEAR_LAYERS for name, flag in zip(stack_of, flags, strict=True)]
    each = config.num_layers // stages
    return [all(slides[place::each]) for place in range(each) if stack_of[place] not in LENDERS]


def windowed_share(config: ModelConfig, *, stages: int = 1) -> float:
    """Return the share of layers with a window in the cached numbers per token of all layers."""
    names = [name for name in config.pattern.stack_of() if name not in LENDERS]
    kept = [layer.num_kv_heads * layer.head_dim for layer in map(config.of_stack, names)]
    kept = [0 if name == LINEAR_LAYERS else width for name, width in zip(names, kept, strict=True)]
    slides = windowed_layers(config, stages=stages) * stages
    return sum(width for width, flag in zip(kept, slides, strict=True) if flag) / sum(kept)


def seen_in_ring(position_BT: Int[Array, "B T"], entries: int, score_mod: ScoreMod) -> Bool[Array, "B T R"]:
    """Return a mask of the entries of a ring that T positions of each slot see.

    Entries of positions after a token count as old positions. No window reaches them while R is at least the window
    plus the number of positions that were written after the token.
    """
    ago_BTR = jnp.mod(position_BT[:, :, None] - jnp.arange(entries)[None, None], entries)
    return score_mod.in_window(ago_BTR) & (ago_BTR <= position_BT[:, :, None])


def ring_of_prompts(
    leaf_PWKH: Float[Array, "P W K H"], row_I: Int[Array, "I"], length_P: Int[Array, "P"], *, entries: int, ways: int
) -> Float[Array, "I R K H"]:
    """Return the newest positions of prompt `row_I[i]`, for each i, in the order of a ring.

    Args:
      ways: Number of devices that share the positions of the prompts.
    """
    newest_I1 = length_P[row_I][:, None] - 1
    # Unused entries get the first position; no window reaches them.
    place_IR = newest_I1 - jnp.mod(newest_I1 - jnp.arange(entries)[None], entries)
    return leaf_PWKH[row_I[:, None], place_of(jnp.maximum(place_IR, 0), leaf_PWKH.shape[1], ways)]


def prompts_of_ring(leaf_PRKH: Float[Array, "P R K H"], *, width: int) -> Float[Array, "P W K H"]:
    """Return the first `width` positions of rings. Overwritten positions have other entries, outside every window."""
    return leaf_PRKH[:, jnp.arange(width) % leaf_PRKH.shape[1]]
