"""Optimal token baseline (OTB): a minimum-variance baseline for each token position, on arithmetic word problems.

    python -m jaxrlhf.train --config otb.py

A forward pass of the actor before the update measures the gradient variance of each token. All other settings are those
of `grpo_arithmetic.py`.

Source: Li et al. 2026 (The optimal token baseline, arXiv:2602.07078).
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
from jaxtyping import Bool, Float, Int

from jaxrlhf import algos
from jaxrlhf.algos.groups import dense_ids
from jaxrlhf.batch import Array
from jaxrlhf.config import Config, GroupCompared, load
from jaxrlhf.dataflows import grpo
from jaxrlhf.dataflows.batches.scored import ScoredRollout
from jaxrlhf.dataflows.step import Roles, StepInput, StepResult, call


def gradient_energy(logp_BT: Float[Array, "B T"], sharp_logp_BT: Float[Array, "B T"]) -> Float[np.ndarray, "B T"]:
    """Compute the squared norm of the gradient of each token's log-probability with respect to the logits.

        e = 1 - 2 p + sum_v p_v^2,  sum_v p_v^2 = exp(2 log p - log p')

    p' is the token's probability at half the temperature: its normalizer is the sum of squared probabilities.

    Args:
      logp_BT: Log-probability of each token.
      sharp_logp_BT: Log-probability of each token at half the temperature.
    """
    logp_BT, sharp_logp_BT = np.asarray(logp_BT, np.float64), np.asarray(sharp_logp_BT, np.float64)
    chance_BT = np.exp(logp_BT)
    squares_BT = np.clip(np.exp(np.minimum(2 * logp_BT - sharp_logp_BT, 0.0)), chance_BT**2, 1.0)
    return 1 - 2 * chance_BT + squares_BT


def optimal_token_baseline(
    reward_BT: Float[Array, "B T"],
    energy_BT: Float[Array, "B T"],
    mask_BT: Bool[Array, "B T"],
    group_B: Int[Array, "B"],
) -> Float[Array, "B T"]:
    """Compute the reward to go minus the minimum-variance baseline of each position in the group; 0 outside the mask.

        R_t = sum_{u >= t} r_u,  W_t = sum_{u <= t} e_u,  b_t = sum_g W_t R_t / sum_g W_t,  A_t = R_t - b_t

    where e_u is the squared norm of the gradient of token u's log-probability. Positions t count action tokens only, so
    outputs of tools or an environment between turns do not shift responses against each other. A position that only one
    response of the group reaches gives 0.

    Args:
      reward_BT: Reward for emitting token t.
      energy_BT: e of each token, or a proxy.
      mask_BT: Action tokens of scorable responses.

    Source: Li et al. 2026 (The optimal token baseline, arXiv:2602.07078).
    """
    mask_BT, group_B = np.asarray(mask_BT, bool), np.asarray(dense_ids(group_B))
    row_N, column_N = np.nonzero(mask_BT)
    place_N = (np.cumsum(mask_BT, axis=1) - 1)[row_N, column_N]
    return_N = np.asarray(algos.discounted_returns(reward_BT, mask_BT, gamma=1.0), np.float64)[row_N, column_N]
    weight_N = np.cumsum(np.where(mask_BT, energy_BT, 0), axis=1, dtype=np.float64)[row_N, column_N]
    at, shape = (group_B[row_N], place_N), (group_B.max(initial=0) + 1, mask_BT.shape[1])
    lowest = np.full(shape, np.inf)
    np.minimum.at(lowest, at, return_N)
    above_N = return_N - lowest[at]  # exactly 0 if all returns are equal
    sums = {}
    for name, value_N in (("weighted", weight_N * above_N), ("weight", weight_N), ("count", np.ones_like(weight_N))):
        sums[name] = np.zeros(shape)
        np.add.at(sums[name], at, value_N)
    known_N = (sums["count"][at] > 1) & (sums["weight"][at] > 0)
    baseline_N = np.divide(sums["weighted"][at], sums["weight"][at], out=above_N.copy(), where=known_N)
    advantage_BT = np.zeros(mask_BT.shape, np.float32)
    advantage_BT[row_N, column_N] = above_N - baseline_N
    return advantage_BT


def learn(roles: Roles, work: StepInput["OptimalTokenBaseline"], batch: ScoredRollout) -> StepResult:
    """Learn with the optimal token baseline: rewards to go minus the baseline of each token position."""
    half = work.config.rollout.sampling.temperature / 2
    sharp_logp = roles.actor.compute_log_prob(batch.rollout, temperature=half)
    sharp_logp_BT = call(lambda _, logp_BT: logp_BT, batch.rollout, sharp_logp)

    def advantage(returns: grpo.Returns) -> Array:
        assert returns.logp_BT is not None
        energy_BT = gradient_energy(returns.logp_BT, np.where(returns.mask_BT, sharp_logp_BT, 0))
        return optimal_token_baseline(returns.reward_BT, energy_BT, returns.mask_BT, returns.prompt_id_B)

    return grpo.learn(roles, work, batch, advantage)


@dataclass(frozen=True)
class OptimalTokenBaseline(GroupCompared):
    """REINFORCE with a minimum-variance baseline for each token position.

    Positions count the policy's tokens over all turns of an episode, without the text between turns.
    """

    learn = learn
    further_passes: ClassVar[tuple[str, ...]] = ("actor",)


def get_config() -> Config:
    """Return the configuration of the run."""
    return replace(load("grpo_arithmetic"), name="otb", algorithm=OptimalTokenBaseline(responses_per_update=64))
