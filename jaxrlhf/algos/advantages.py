"""Advantages from a critic's values or from the other responses to a prompt.

Critic-based estimates are per token and skip tokens outside the mask: a tool's output between two turns neither
discounts nor bootstraps. Group-based estimates are per response; `to_tokens` gives them to the tokens. Rows with the
same id in `group_B` are one group, in any order; ids beyond 32 bits must be a numpy array, hence outside `jit`.
Unscorable rows are ignored and get exactly 0. A group of one row and a group of equal scores get exactly 0 too.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Bool, Float, Int

from jaxrlhf.algos.groups import dense_ids, group_min, group_sum
from jaxrlhf.algos.masked import selected
from jaxrlhf.batch import Array


class Targets(NamedTuple):
    """Advantages (not whitened) for the policy, and returns for the critic; 0 outside the mask."""

    advantage_BT: Float[Array, "B T"]
    return_BT: Float[Array, "B T"]


@partial(jax.jit, static_argnames=("gamma",))
def gae(
    reward_BT: Float[Array, "B T"],
    value_BT: Float[Array, "B T"],
    mask_BT: Bool[Array, "B T"],
    *,
    gamma: float,
    lam: float | Float[Array, ""] | Float[Array, "B"],
) -> Targets:
    """Compute generalized advantage estimation (GAE) over action tokens, the tokens that the policy chose.

        delta_t  = r_t + gamma * v_t' - v_t
        A_t      = delta_t + gamma * lam * A_t'
        return_t = A_t + v_t

    where t' is the next action token after t, and v and A are 0 after the last action token.

    Args:
      reward_BT: Reward for emitting token t, KL penalty already subtracted.
      value_BT: Critic's estimate for the prefix before token t, in reward units.
      gamma: Discount per action token, in [0, 1].
      lam: Lambda, one for all responses or one per response; 0 is one-step TD, 1 is Monte Carlo.

    Source: Schulman et al. 2016 (arXiv:1506.02438), eq. 16.
    """
    value_BT = selected(value_BT, mask_BT)
    value_from_BT = _from_the_right(jnp.where(mask_BT, 0.0, 1.0), value_BT)
    next_value_BT = jnp.pad(value_from_BT[:, 1:], ((0, 0), (0, 1)))
    delta_BT = selected(reward_BT + gamma * next_value_BT - value_BT, mask_BT)
    decay_X1 = gamma * jnp.reshape(jnp.asarray(lam, delta_BT.dtype), (-1, 1))
    advantage_BT = selected(_from_the_right(jnp.where(mask_BT, decay_X1, 1.0), delta_BT), mask_BT)
    return Targets(advantage_BT, advantage_BT + value_BT)


def length_adaptive_lambda(length_B: Int[Array, "B"], *, scale: float) -> Float[Array, "B"]:
    """Compute GAE's lambda of each response from its length in action tokens: longer is closer to Monte Carlo.

        lambda = max(0, 1 - 1 / (scale * length))

    A TD error then decays over a fraction of the response that does not depend on the response's length.

    Source: Yue et al. 2025 (VAPO, arXiv:2504.05118), section 3.3.
    """
    return 1.0 - 1.0 / jnp.maximum(scale * jnp.asarray(length_B), 1.0)


@partial(jax.jit, static_argnames=("gamma",))
def discounted_returns(
    reward_BT: Float[Array, "B T"], mask_BT: Bool[Array, "B T"], *, gamma: float
) -> Float[Array, "B T"]:
    """Compute the reward to go, `R_t = r_t + gamma * R_t'` with t' the next action token; 0 outside the mask.

    Args:
      reward_BT: Reward for emitting token t; ignored outside the mask.
      gamma: Discount per action token, in [0, 1].

    Source: Sutton & Barto 2018, eq. 3.9.
    """
    return selected(_from_the_right(jnp.where(mask_BT, gamma, 1.0), selected(reward_BT, mask_BT)), mask_BT)


def _from_the_right(decay_BT: Array, term_BT: Array) -> Array:
    """Solve `y_t = term_t + decay_t * y_{t+1}` for all t in O(log T) steps."""

    def compose(right: tuple[Array, Array], left: tuple[Array, Array]) -> tuple[Array, Array]:
        return right[0] * left[0], left[1] + left[0] * right[1]

    pairs = (decay_BT.astype(term_BT.dtype), term_BT)
    return lax.associative_scan(compose, pairs, reverse=True, axis=1)[1]


def group_relative(
    score_B: Float[Array, "B"],
    scorable_B: Bool[Array, "B"],
    group_B: Int[Array, "B"],
    *,
    normalize_std: bool,
) -> Float[Array, "B"]:
    """Compute GRPO's advantage: the score minus the group's mean, divided by the group's standard deviation.

        A_i = (s_i - mean_g) / (std_g + 1e-6)

    The standard deviation is unbiased (n - 1).

    Args:
      normalize_std: True divides by the standard deviation; False is Dr. GRPO, which avoids the bias of the division.

    Source: Shao et al. 2024 (arXiv:2402.03300), section 4.1.2; Liu et al. 2025 (arXiv:2503.20783), section 3, for
    `normalize_std=False`.
    """
    group_B = dense_ids(group_B)
    centred_B, count_B = _centred(score_B, scorable_B, group_B)
    return centred_B / _deviation(centred_B, count_B, group_B) if normalize_std else centred_B


def rloo(score_B: Float[Array, "B"], scorable_B: Bool[Array, "B"], group_B: Int[Array, "B"]) -> Float[Array, "B"]:
    """Compute REINFORCE leave-one-out (RLOO): the score minus the mean of the *other* scores of the group.

        A_i = s_i - sum_{j != i} s_j / (n - 1) = (s_i - mean_g) * n / (n - 1)

    Source: Kool et al. 2019 (Buy 4 REINFORCE samples, get a baseline for free!), for language models Ahmadian et al.
    2024 (arXiv:2402.14740).
    """
    centred_B, count_B = _centred(score_B, scorable_B, dense_ids(group_B))
    return centred_B * count_B / jnp.maximum(count_B - 1, 1)


def length_weighted(
    score_B: Float[Array, "B"],
    scorable_B: Bool[Array, "B"],
    group_B: Int[Array, "B"],
    length_B: Int[Array, "B"],
) -> Float[Array, "B"]:
    """Compute OPO's advantage: the score minus the group's mean score, weighted by response length.

        A_i = s_i - sum_g l_j * s_j / sum_g l_j

    This baseline has the least variance if the squared gradient of a response is proportional to its length.

    Args:
      length_B: Number of action tokens of each response.

    Source: Hao et al. 2025 (OPO, arXiv:2505.23585), eq. 8.
    """
    group_B = dense_ids(group_B)
    above_B = _above_lowest(score_B, scorable_B, group_B)
    weight_B = jnp.where(scorable_B, jnp.asarray(length_B), 0)
    mean_B = group_sum(weight_B * above_B, group_B) / jnp.maximum(group_sum(weight_B, group_B), 1)
    return selected(above_B - mean_B, scorable_B)


def group_policy_gradient(
    score_B: Float[Array, "B"], scorable_B: Bool[Array, "B"], group_B: Int[Array, "B"]
) -> Float[Array, "B"]:
    """Compute GPG's advantage: the score minus the group's mean, scaled up to make up for groups of equal scores.

        A_i = alpha * (s_i - mean_g),  alpha = responses / responses in groups whose scores differ

    A mean over the batch then has the gradient of a mean over the groups whose scores differ.

    Source: Chu et al. 2025 (GPG, arXiv:2504.02546), section 3.3.
    """
    group_B = dense_ids(group_B)
    centred_B, _ = _centred(score_B, scorable_B, group_B)
    teaches_B = (group_sum(jnp.abs(centred_B), group_B) > 0) & scorable_B
    scale = jnp.count_nonzero(scorable_B) / jnp.maximum(jnp.count_nonzero(teaches_B), 1)
    return centred_B * scale.astype(centred_B.dtype)


def greedy_relative(
    reward_BT: Float[Array, "B T"], baseline_B: Float[Array, "B"], mask_BT: Bool[Array, "B T"]
) -> Float[Array, "B T"]:
    """Compute ReMax's advantage: the reward to go minus the score of the greedy response; 0 outside the mask.

        A_t = sum_{s >= t} r_s - baseline

    Args:
      reward_BT: Reward for emitting token t, KL penalty already subtracted.
      baseline_B: Score of the greedy response to each row's prompt.

    Source: Li et al. 2024 (ReMax, arXiv:2310.10505), section 4.
    """
    return selected(discounted_returns(reward_BT, mask_BT, gamma=1.0) - jnp.asarray(baseline_B)[:, None], mask_BT)


def best_of_group(
    score_B: Float[Array, "B"], scorable_B: Bool[Array, "B"], group_B: Int[Array, "B"], *, normalize_std: bool
) -> Float[Array, "B"]:
    """Compute best-of-group advantages: only the best response gets one, its margin over the second-best score.

        A_i = (s_i - max_{j != i} s_j) / (std_g + 1e-6)    for the best of the group, 0 for the others

    The expectation is the gradient of the best score among k responses, with k the group size (pass@k if scores are 0
    and 1). A group with several best responses gives 0, as does a group of one.

    Args:
      normalize_std: True divides by the group's standard deviation, as in the formula.

    Source: Tang et al. 2025 (Optimizing language models for inference time objectives, arXiv:2503.19595), section 4.
    """
    group_B = dense_ids(group_B)
    above_B = _above_lowest(score_B, scorable_B, group_B)
    place_B = jnp.arange(len(group_B))
    best_B = -group_min(-above_B, group_B)
    winner_B = scorable_B & (above_B == best_B)
    first_B = winner_B & (place_B == group_min(jnp.where(winner_B, place_B, len(group_B)), group_B))
    second_B = -group_min(jnp.where(first_B | ~jnp.asarray(scorable_B), jnp.inf, -above_B), group_B)
    ahead_B = jnp.where(first_B & jnp.isfinite(second_B), above_B - second_B, 0.0)
    if not normalize_std:
        return ahead_B
    centred_B, count_B = _centred(score_B, scorable_B, group_B)
    return ahead_B / _deviation(centred_B, count_B, group_B)


def has_spread(score_B: Float[Array, "B"], scorable_B: Bool[Array, "B"], group_B: Int[Array, "B"]) -> Bool[Array, "B"]:
    """Return True for the rows of groups whose scorable scores differ, so that there is something to learn.

    Source: Yu et al. 2025 (DAPO, arXiv:2503.14476), eq. 11.
    """
    group_B = dense_ids(group_B)
    return group_sum(_above_lowest(score_B, scorable_B, group_B), group_B) > 0


@jax.jit
def _above_lowest(score_B: Array, scorable_B: Array, group_B: Array) -> Array:
    """Subtract from scorable scores the lowest of their group; 0 for unscorable rows.

    Relative to the lowest score, equal scores are exactly 0, and so is their mean. The mean of raw scores has a
    rounding error, and a rounding error divided by a rounding error is a full-size advantage.
    """
    lowest_B = group_min(jnp.where(scorable_B, score_B, jnp.inf), group_B)
    return selected(score_B - lowest_B, scorable_B)


@jax.jit
def _centred(score_B: Array, scorable_B: Array, group_B: Array) -> tuple[Array, Array]:
    """Return scorable scores minus their group's mean (0 elsewhere), and the number of scorable rows in each group."""
    above_B = _above_lowest(score_B, scorable_B, group_B)
    count_B = group_sum(jnp.asarray(scorable_B, int), group_B)
    return selected(above_B - group_sum(above_B, group_B) / jnp.maximum(count_B, 1), scorable_B), count_B


_SQUARABLE = 1e15
"""Largest absolute centered score that is squared without scaling."""


def _deviation(centred_B: Array, count_B: Array, group_B: Array) -> Array:
    """Return the standard deviation of each row's group, plus 1e-6; scores too large to square are scaled first."""
    wide_B = group_sum(jnp.asarray(jnp.abs(centred_B) > _SQUARABLE, jnp.float32), group_B) > 0
    scale_B = jnp.where(wide_B, jnp.float32(2.0**-70), 1.0)
    variance_B = group_sum(jnp.square(centred_B * scale_B), group_B) / jnp.maximum(count_B - 1, 1)
    return jnp.sqrt(variance_B) / scale_B + 1e-6


def to_tokens(advantage_B: Float[Array, "B"], mask_BT: Bool[Array, "B T"]) -> Float[Array, "B T"]:
    """Give each action token its response's advantage; 0 outside the mask."""
    return jnp.where(mask_BT, jnp.asarray(advantage_B)[:, None], 0)
