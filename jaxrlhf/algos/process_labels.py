"""Process reward models trained on step labels: their loss, and the score of a solution."""

from typing import Literal

import jax
import numpy as np
from jaxtyping import Float

from jaxrlhf.algos.masked import selected
from jaxrlhf.algos.objectives import Fields, Mask, ObjectiveTerms, TokenValues


def step_objective(
    output: TokenValues, mask: Mask, weight: TokenValues, fields: Fields, settings: object
) -> ObjectiveTerms:
    """Compute the cross-entropy of a step's label y, given the log-odds v after the step. Settings are not read.

        loss = -y log sigmoid(v) - (1 - y) log sigmoid(-v)

    Args:
      output: Critic's value of the prefix before each token.
      mask: Tokens that directly follow a step, whose prefix ends with the step.
      fields: `label`, 1 if the step before the token is right, else 0.

    Source: Lightman et al. 2023 (arXiv:2305.20050), section 2.6; Wang et al. 2024 (Math-Shepherd, arXiv:2312.08935).
    """
    logit, label = selected(output, mask), selected(fields["label"], mask)
    loss = selected(jax.nn.softplus(logit) - label * logit, mask)
    right = selected(((logit > 0) == (label > 0)).astype(loss.dtype), mask)
    return ObjectiveTerms(selected(weight, mask) * loss, {"steps/loss": loss, "steps/accuracy": right})


def solution_score(logit_S: Float[np.ndarray, "S"], reduction: Literal["min", "last", "mean", "product"]) -> float:
    """Combine the log-odds of a solution's S steps to a score: a reduction of the steps' probabilities to be right.

    Source: product and minimum as in Lightman et al. 2023 (arXiv:2305.20050), section 2.6 and appendix F.
    """
    chance_S = np.exp(-np.logaddexp(0.0, -np.asarray(logit_S, np.float64)))
    match reduction:
        case "min":
            return float(chance_S.min())
        case "last":
            return float(chance_S[-1])
        case "mean":
            return float(chance_S.mean())
        case "product":
            return float(chance_S.prod())
