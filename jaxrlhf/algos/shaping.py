"""Reward shaping: from a score per response to a reward per token."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Bool, Float, Int

from jaxrlhf.algos.masked import selected
from jaxrlhf.batch import Array


def token_rewards(
    score_B: Float[Array, "B"],
    kl_BT: Float[Array, "B T"] | None,
    mask_BT: Bool[Array, "B T"],
    *,
    kl_coefficient: float,
) -> Float[Array, "B T"]:
    """Pay the score at the last action token, and charge each action token for its KL.

        r_t = [t is the last action token] * score - kl_coefficient * kl_t

    Outside the mask, and in rows without an action token, the reward is 0.

    Args:
      kl_BT: Estimate of KL(old policy || reference) per token; None charges nothing.
      kl_coefficient: Reward units per nat.

    Source: Ziegler et al. 2019 (arXiv:1909.08593), eq. 2; per token as in Ouyang et al. 2022 (arXiv:2203.02155),
    section 3.5.
    """
    actions_from_BT = lax.cumsum(jnp.asarray(mask_BT, int), axis=1, reverse=True)
    is_last_BT = mask_BT & (actions_from_BT == 1)
    reward_BT = jnp.where(is_last_BT, jnp.asarray(score_B)[:, None], 0)
    return reward_BT if kl_BT is None else reward_BT - kl_coefficient * selected(kl_BT, mask_BT)


def overlong_penalty(
    length_B: Int[Array, "B"], *, max_tokens: int, buffer_tokens: int, factor: float
) -> Float[Array, "B"]:
    """Compute the soft overlong punishment of responses, to be added to the score.

    The penalty is 0 up to `max_tokens - buffer_tokens`, falls linearly to `-factor` at `max_tokens`, and is `-factor`
    beyond.

    Args:
      buffer_tokens: Number of tokens over which the penalty grows, from 1 to `max_tokens`.
      factor: Largest penalty, in score units.

    Raises:
      ValueError: If the buffer is empty or longer than a response may be.

    Source: Yu et al. 2025 (DAPO, arXiv:2503.14476), eq. 13.
    """
    if not 1 <= buffer_tokens <= max_tokens:
        raise ValueError(f"buffer_tokens={buffer_tokens}; expected 1 to max_tokens={max_tokens}")
    excess_B = jnp.clip(length_B - (max_tokens - buffer_tokens), 0, buffer_tokens)
    return -factor * excess_B / buffer_tokens
