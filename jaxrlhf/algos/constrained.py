"""Lagrangian of a reward under a limit on a cost: its advantage, and the update of its multiplier.

Source: Dai et al. 2023 (Safe RLHF, arXiv:2310.12773), section 3.3 and appendix B.3.
"""

import math

from jaxtyping import Float

from jaxrlhf.batch import Array


def lagrangian_advantage(
    gain: Float[Array, "*shape"], cost: Float[Array, "*shape"], *, multiplier: float
) -> Float[Array, "*shape"]:
    """Advantage of the reward less the cost at its price.

        A = (A_reward - multiplier * A_cost) / (1 + multiplier)

    Args:
      multiplier: 0 or more.
    """
    return (gain - multiplier * cost) / (1 + multiplier)


def next_multiplier(multiplier: float, cost: float, *, limit: float, learning_rate: float, largest: float) -> float:
    """The Lagrange multiplier after a step of gradient ascent on its logarithm.

        log m <- min(log m + learning_rate * m * (cost - limit), log largest)

    It never falls to 0, and moves the faster the further it has risen.

    Args:
      multiplier: Above 0.
      cost: Mean over responses.
    """
    log_multiplier = math.log(multiplier) + learning_rate * multiplier * (cost - limit)
    return math.exp(min(log_multiplier, math.log(largest)))
