"""The most reward under a limit on a cost: the multiplier that prices the cost, and what it makes of two advantages.

Source: Dai et al. 2023 (Safe RLHF, arXiv:2310.12773), section 3.3 and appendix B.3.
"""

import math

from jaxtyping import Float

from jaxrlhf.batch import Array


def lagrangian_advantage(
    gain: Float[Array, "*shape"], cost: Float[Array, "*shape"], *, multiplier: float
) -> Float[Array, "*shape"]:
    """What a unit of reward and a unit of cost, at its price, come to.

        A = (A_reward - multiplier * A_cost) / (1 + multiplier)

    Args:
      gain: Advantage in the reward.
      cost: Advantage in the cost, which is bad.
      multiplier: 0 or more.
    """
    return (gain - multiplier * cost) / (1 + multiplier)


def next_multiplier(multiplier: float, cost: float, *, limit: float, learning_rate: float, largest: float) -> float:
    """The price of a unit of cost after a step of gradient ascent on its logarithm.

        log m <- min(log m + learning_rate * m * (cost - limit), log largest)

    So it never falls to 0, and the further it has risen the faster it moves.

    Args:
      multiplier: The one so far, above 0.
      cost: Mean over responses.
    """
    log_multiplier = math.log(multiplier) + learning_rate * multiplier * (cost - limit)
    return math.exp(min(log_multiplier, math.log(largest)))
