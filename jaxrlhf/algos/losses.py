"""Token losses: what one sampled token contributes, before weighting and summing.

Everything is elementwise and indifferent to shape and packing. Tokens outside the mask must
hold finite numbers; `jaxrlhf.algos.objectives` sees to that.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Bool, Float

from jaxrlhf.algos.kl import LOG_RATIO_LIMIT
from jaxrlhf.batch import Array


class PolicyTerms(NamedTuple):
    """Per-token results of `clipped_policy_loss`.

    Attributes:
      loss: To be weighted and summed.
      ratio: pi / pi_old.
      log_ratio: Its clamped logarithm; the mean of its negative estimates KL(old || new).
      clipped: Whether the clipped ratio decides the loss.
      clipped_low: Whether the dual clip bounds the loss.
    """

    loss: Float[Array, "*shape"]
    ratio: Float[Array, "*shape"]
    log_ratio: Float[Array, "*shape"]
    clipped: Bool[Array, "*shape"]
    clipped_low: Bool[Array, "*shape"]


def clipped_policy_loss(
    logp: Float[Array, "*shape"],
    old_logp: Float[Array, "*shape"],
    advantage: Float[Array, "*shape"],
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> PolicyTerms:
    """PPO's clipped surrogate, as a loss.

        ratio = exp(clip(logp - old_logp, -20, 20))
        loss  = max(-A * ratio, -A * clip(ratio, 1 - clip_low, 1 + clip_high))
        loss  = min(loss, -dual_clip * A)  where A < 0

    Args:
      logp: Current policy, temperature applied; the argument to differentiate by.
      old_logp: Policy at the start of the update.
      clip_low: Ratio may fall to 1 - clip_low before the gradient stops.
      clip_high: Ratio may rise to 1 + clip_high before the gradient stops.
      dual_clip: Above 1; bounds the loss of unwanted tokens that became far likelier. None is off.

    Source: Schulman et al. 2017 (arXiv:1707.06347), eq. 7; two-sided bounds: Yu et al. 2025
    (DAPO, arXiv:2503.14476), eq. 10; dual clip: Ye et al. 2020 (arXiv:1912.09729).
    """
    log_ratio = jnp.clip(jnp.subtract(logp, old_logp), -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    ratio = jnp.exp(log_ratio)
    plain = -advantage * ratio
    clipped = -advantage * jnp.clip(ratio, 1 - clip_low, 1 + clip_high)
    loss = jnp.maximum(plain, clipped)
    clipped_low: Array = jnp.zeros(loss.shape, bool)
    if dual_clip is not None:
        bound = -dual_clip * advantage
        clipped_low = (advantage < 0) & (loss > bound)
        loss = jnp.where(clipped_low, bound, loss)
    return PolicyTerms(loss, ratio, log_ratio, clipped > plain, clipped_low)


class ValueTerms(NamedTuple):
    """Per-token results of `clipped_value_loss`: the loss, and whether the clipped value decides it."""

    loss: Float[Array, "*shape"]
    clipped: Bool[Array, "*shape"]


def clipped_value_loss(
    value: Float[Array, "*shape"],
    old_value: Float[Array, "*shape"],
    returns: Float[Array, "*shape"],
    *,
    clip: float,
) -> ValueTerms:
    """Half the squared error, pessimistic about moves beyond `clip` from the old value.

        v_clip = old_value + clip(value - old_value, -clip, clip)
        loss   = max((value - returns)^2, (v_clip - returns)^2) / 2

    Args:
      value: Current critic; the argument to differentiate by.
      old_value: Critic at the start of the update.
      returns: Regression target, in reward units like the values.
      clip: In reward units.

    Source: OpenAI Baselines; described in Engstrom et al. 2020 (arXiv:2005.12729), section 3.
    """
    near_value = jnp.clip(value, old_value - clip, old_value + clip)
    plain = jnp.square(value - returns)
    clipped = jnp.square(near_value - returns)
    return ValueTerms(jnp.maximum(plain, clipped) / 2, clipped > plain)
