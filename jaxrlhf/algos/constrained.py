"""Constrained RL by a Lagrangian: advantage of a reward under a cost limit, and the update of the multiplier.

Source: Dai et al. 2023 (Safe RLHF, arXiv:2310.12773), section 3.3 and appendix B.3.
"""

import math

from jaxtyping import Float

from jaxrlhf.batch import Array


def lagrangian_advantage(
    gain: Float[Array, "*shape"], cost: Float[Array, "*shape"], *, multiplier: float
) -> Float[Array, "*shape"]:
    """Combine the advantages of reward and cost, the cost weighted by the Lagrange multiplier.

        A = (A_reward - multiplier * A_cost) / (1 + multiplier)

    Args:
      gain: Advantage of the reward.
      cost: Advantage of the cost.
      multiplier: Lagrange multiplier, 0 or more.
    """
    return (gain - multiplier * cost) / (1 + multiplier)


def next_multiplier(multiplier: float, cost: float, *, limit: float, learning_rate: float, largest: float) -> float:
    """Update the Lagrange multiplier by one step of gradient ascent on its logarithm.

        log m <- min(log m + learning_rate * m * (cost - limit), log largest)

    The multiplier never falls to 0; the larger it is, the faster it changes.

    Args:
      multiplier: Current multiplier, above 0.
      cost: Mean cost over responses.
    """
    log_multiplier = math.log(multiplier) + learning_rate * multiplier * (cost - limit)
    return math.exp(min(log_multiplier, math.log(largest)))
