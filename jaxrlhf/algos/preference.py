"""Losses of preference pairs, one number per pair.

`chosen_P` and `rejected_P` are scores of the two answers, or sums over their tokens: of log pi - log pi_ref in DPO, IPO
and KTO, of log pi in SimPO, CPO and ORPO. `pair_objective` computes these sums in the trainer's programs.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int, Num

from jaxrlhf.batch import Array


def dpo(
    chosen_P: Float[Array, "P"], rejected_P: Float[Array, "P"], *, beta: float, label_smoothing: float = 0.0
) -> Float[Array, "P"]:
    """Compute the DPO loss (direct preference optimization).

        D = chosen - rejected
        L = -(1 - e) log sigmoid(beta D) - e log sigmoid(-beta D)

    Args:
      beta: Reward units per nat.
      label_smoothing: e, the probability that a label is wrong, below 0.5.

    Source: Rafailov et al. 2023 (arXiv:2305.18290), eq. 7; smoothing: Mitchell 2023, "A note on DPO with noisy
    preferences", eq. 3.
    """
    reward_P = beta * (chosen_P - rejected_P)
    return -(1 - label_smoothing) * jax.nn.log_sigmoid(reward_P) - label_smoothing * jax.nn.log_sigmoid(-reward_P)


def ipo(chosen_P: Float[Array, "P"], rejected_P: Float[Array, "P"], *, beta: float) -> Float[Array, "P"]:
    """Compute the IPO loss (identity preference optimization), whose target difference is 1 / (2 beta).

        L = (chosen - rejected - 1 / (2 beta))^2

    Source: Azar et al. 2023 (arXiv:2310.12036), eq. 17.
    """
    return jnp.square(chosen_P - rejected_P - 1 / (2 * beta))


def nll_per_token(chosen_logp_P: Float[Array, "P"], tokens_P: Num[Array, "P"]) -> Float[Array, "P"]:
    """Compute the chosen answer's negative log-likelihood per token, which RPO, CPO and ORPO add; 0 without tokens.

        L = -log pi(chosen) / tokens

    Source: Pang et al. 2024 (iterative RPO, arXiv:2404.19733), eq. 1.
    """
    return -chosen_logp_P / jnp.maximum(tokens_P, 1)


def simpo(
    chosen_P: Float[Array, "P"],
    rejected_P: Float[Array, "P"],
    tokens_PA: Num[Array, "P 2"],
    *,
    beta: float,
    margin: float,
) -> Float[Array, "P"]:
    """Compute the SimPO loss (simple preference optimization): rewards are mean log-probabilities, without a reference.

        L = -log sigmoid(beta (chosen / tokens_c - rejected / tokens_r) - margin)

    Args:
      tokens_PA: Number of tokens of the chosen and of the rejected answer.

    Source: Meng et al. 2024 (arXiv:2405.14734), eq. 6.
    """
    scale_PA = beta / jnp.maximum(jnp.asarray(tokens_PA), 1)
    return bradley_terry(scale_PA[:, 0] * chosen_P, scale_PA[:, 1] * rejected_P, margin)


def odds_ratio(
    chosen_P: Float[Array, "P"], rejected_P: Float[Array, "P"], tokens_PA: Num[Array, "P 2"], *, coefficient: float
) -> Float[Array, "P"]:
    """Compute the odds-ratio loss of ORPO, from the odds of both answers by mean log-probabilities.

        L = -coefficient * log sigmoid(o_c - o_r),  o = m - log(1 - exp(m)),  m = log pi / tokens

    Args:
      tokens_PA: Number of tokens of the chosen and of the rejected answer.

    Source: Hong et al. 2024 (ORPO, arXiv:2403.07691), eq. 4 and 7; ORPO's likelihood term is `nll_per_token`.
    """
    count_PA = jnp.maximum(jnp.asarray(tokens_PA), 1)
    # An answer with probability 1 has infinite odds.
    mean_PA = jnp.minimum(jnp.stack([chosen_P, rejected_P], axis=1) / count_PA, -1e-6)
    odds_PA = mean_PA - jnp.log(-jnp.expm1(mean_PA))
    return coefficient * bradley_terry(odds_PA[:, 0], odds_PA[:, 1])


def kto(
    chosen_P: Float[Array, "P"],
    rejected_P: Float[Array, "P"],
    distance: Float[Array, "..."] | float,
    *,
    beta: float,
    weights: tuple[float, float],
) -> Float[Array, "P"]:
    """Compute the KTO loss (Kahneman-Tversky optimization): the value of each answer relative to a reference point.

        L = w_c (1 - sigmoid(beta (chosen - z))) / 2 + w_r (1 - sigmoid(beta (z - rejected))) / 2,  z = max(distance, 0)

    The division by 2 makes the mean over pairs equal to the mean over answers.

    Args:
      distance: Estimate of KL(pi || pi_ref) in nats, of all pairs or of each; a constant for the gradient.
      weights: Weight of a good answer and of a bad answer.

    Source: Ethayarajh et al. 2024 (arXiv:2402.01306), eq. 8.
    """
    zero = jnp.maximum(distance, 0)
    good_P, bad_P = jax.nn.sigmoid(beta * (chosen_P - zero)), jax.nn.sigmoid(beta * (zero - rejected_P))
    return weights[0] / 2 * (1 - good_P) + weights[1] / 2 * (1 - bad_P)


def bradley_terry(
    chosen_P: Float[Array, "P"], rejected_P: Float[Array, "P"], margin_P: Float[Array, "P"] | float = 0.0
) -> Float[Array, "P"]:
    """Compute the Bradley-Terry loss: -log of the probability that the chosen answer is preferred, given both scores.

        L = -log sigmoid(chosen - rejected - margin)

    Source: Ouyang et al. 2022 (arXiv:2203.02155), eq. 1; margin: Touvron et al. 2023 (arXiv:2307.09288), eq. 2.
    """
    return -jax.nn.log_sigmoid(chosen_P - rejected_P - margin_P)


def pair_cost(
    chosen_P: Float[Array, "P"],
    rejected_P: Float[Array, "P"],
    chosen_safe_P: Bool[Array, "P"],
    rejected_safe_P: Bool[Array, "P"],
) -> Float[Array, "P"]:
    """Compute the cost model's loss: the rejected, more harmful answer costs more; a harmless answer costs below 0.

        L = -log sigmoid(rejected - chosen) - log sigmoid(s_c chosen) - log sigmoid(s_r rejected)

    with s = -1 for a harmless answer and 1 for a harmful one.

    Source: Dai et al. 2023 (Safe RLHF, arXiv:2310.12773), section 3.2, the cost model's loss.
    """
    sign_c_P, sign_r_P = (jnp.where(safe_P, -1.0, 1.0) for safe_P in (chosen_safe_P, rejected_safe_P))
    signs_P = -jax.nn.log_sigmoid(sign_c_P * chosen_P) - jax.nn.log_sigmoid(sign_r_P * rejected_P)
    return bradley_terry(rejected_P, chosen_P) + signs_P


def best_and_worst(
    score_B: Float[Array, "B"],
    scorable_B: Bool[Array, "B"],
    group_B: Int[Array, "B"],
    log_ratio_B: Float[Array, "B"],
    *,
    beta: float,
) -> Float[Array, "B"]:
    """Compute advantages that turn a policy gradient into online DPO on the best and worst response to each prompt.

        A = n * s for the best, -n * s for the worst, 0 for the others,  s = beta * sigmoid(-beta D)

    D is the difference of the two responses' log-ratios. n is the mean group size without unscorable rows: if token
    losses are summed and responses averaged, the gradient is that of the mean over prompts. Ties for best or worst take
    the mean over all pairs; a group of equal scores gives 0.

    Args:
      log_ratio_B: log pi - log pi_ref of each response, summed over its tokens.

    Source: Guo et al. 2024 (Online AI feedback, arXiv:2402.04792), algorithm 1.
    """
    score_B, group_B, ratio_B = np.asarray(score_B), np.asarray(group_B), np.asarray(log_ratio_B)
    advantage_B, known_B = np.zeros(len(score_B), np.float32), np.asarray(scorable_B)
    size = known_B.sum() / max(len(np.unique(group_B[known_B])), 1)
    for group in np.unique(group_B):
        rows = np.flatnonzero((group_B == group) & known_B)
        if len(rows) == 0 or score_B[rows].max() == score_B[rows].min():
            continue
        best, worst = (rows[score_B[rows] == extreme(score_B[rows])] for extreme in (np.max, np.min))
        distance_CR = ratio_B[best][:, None] - ratio_B[worst]
        slope_CR = beta * (1 - np.tanh(beta * distance_CR / 2)) / 2  # a sigmoid that never overflows
        advantage_B[best] = size * slope_CR.mean(axis=1) / len(best)
        advantage_B[worst] = -size * slope_CR.mean(axis=0) / len(worst)
    return advantage_B
