"""Implicit process reward model: rewards per token, learned from the outcomes of whole responses.

A language model is trained so that its log-ratio to a reference, summed over a response, predicts whether the response
is right. The log-ratio of each token is then the token's reward.

Source: Yuan et al. 2024 (Free process rewards without process labels, arXiv:2412.01981); online, as a reward: Cui et
al. 2025 (PRIME, arXiv:2502.01456).
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int

from jaxrlhf.algos.advantages import discounted_returns
from jaxrlhf.algos.groups import dense_ids, group_sum
from jaxrlhf.algos.masked import masked_mean, segment_sum, selected
from jaxrlhf.algos.objectives import Fields, Mask, ObjectiveTerms, TokenOutput, TokenValues
from jaxrlhf.batch import Array


def outcome_objective(
    output: TokenOutput, mask: Mask, weight: TokenValues, fields: Fields, settings: Any
) -> ObjectiveTerms:
    """Compute the cross-entropy of a response's outcome y, given the response's summed log-ratio.

        q_t  = logp_t - ref_logp_t
        loss = -y log sigmoid(beta sum_t q_t) - (1 - y) log sigmoid(-beta sum_t q_t)

    Each token of a response has the response's loss. Weights that sum to 1 / responses over each response give the mean
    over responses.

    Args:
      output: Log-probabilities of the process reward model.
      fields: `ref_logp`, `outcome` (1 at the tokens of right responses, else 0), and `segment`.
      settings: Settings with `beta`; nothing else is read.

    Source: Cui et al. 2025 (arXiv:2502.01456), eq. 5.
    """
    segment = selected(fields["segment"], mask)
    ratio = selected(output.logp, mask) - selected(fields["ref_logp"], mask)
    logit = settings.beta * segment_sum(ratio, segment)
    right = selected(fields["outcome"], mask)
    loss = selected(jax.nn.softplus(logit) - right * logit, mask)
    return ObjectiveTerms(selected(weight, mask) * loss, {})


def leave_one_out_rewards(
    reward_BT: Float[Array, "B T"], paid_BT: Bool[Array, "B T"], group_B: Int[Array, "B"]
) -> Float[Array, "B T"]:
    """Subtract from each token's reward the mean reward of the other responses to the prompt (leave-one-out).

        r'_t = (n r_t - sum_{j of the group} m_j) / (n - 1)

    m_j is the mean over the rewarded tokens of response j, and n the number of the group's responses with rewarded
    tokens. A group of one response gives 0.

    Args:
      paid_BT: Tokens that get a reward: all action tokens, or the last one.

    Source: Cui et al. 2025 (arXiv:2502.01456), eq. 6.
    """
    group_B = dense_ids(group_B)
    counted_B = jnp.any(paid_BT, axis=1)
    count_B = group_sum(jnp.asarray(counted_B, int), group_B)
    mean_B = masked_mean(reward_BT, paid_BT, axis=1)
    total_B = group_sum(mean_B, group_B)
    relative_BT = (count_B[:, None] * reward_BT - total_B[:, None]) / jnp.maximum(count_B - 1, 1)[:, None]
    return selected(relative_BT, paid_BT & (count_B > 1)[:, None])


def normalized_rewards(reward_BT: Float[Array, "B T"], mask_BT: Bool[Array, "B T"]) -> Float[Array, "B T"]:
    """Divide the rewards by the batch's largest absolute reward to go, so that no reward to go exceeds 1 in size.

    r_t / (max |sum_{s >= t} r_s| + 1e-6)
    """
    return selected(reward_BT, mask_BT) / (jnp.abs(discounted_returns(reward_BT, mask_BT, gamma=1.0)).max() + 1e-6)


def process_returns(
    outcome_BT: Float[Array, "B T"],
    process_BT: Float[Array, "B T"],
    mask_BT: Bool[Array, "B T"],
    group_B: Int[Array, "B"],
    *,
    gamma: float,
) -> Float[Array, "B T"]:
    """Compute the reward to go of outcome plus process rewards, each relative to the other responses to the prompt.

        sum_{s >= t} outcome'_s + sum_{s >= t} gamma^(s - t) process'_s

    Args:
      outcome_BT: Outcome reward, at the last action token.
      process_BT: Process reward, at every action token.
      gamma: Discount of the process rewards per action token.

    Source: Cui et al. 2025 (arXiv:2502.01456), eq. 6.
    """
    actions_from_BT = jnp.cumsum(mask_BT[:, ::-1], axis=1)[:, ::-1]
    last_BT = mask_BT & (actions_from_BT == 1)
    outcome = discounted_returns(leave_one_out_rewards(outcome_BT, last_BT, group_B), mask_BT, gamma=1.0)
    return outcome + discounted_returns(leave_one_out_rewards(process_BT, mask_BT, group_B), mask_BT, gamma=gamma)
