"""Process reward models that are trained by labels of steps: their loss, and the score of a solution."""

from typing import Literal

import jax
import numpy as np
from jaxtyping import Float

from jaxrlhf.algos.masked import selected
from jaxrlhf.algos.objectives import Fields, Mask, ObjectiveTerms, TokenValues


def step_objective(
    output: TokenValues, mask: Mask, weight: TokenValues, fields: Fields, settings: object
) -> ObjectiveTerms:
    """Cross-entropy of a step's label y, given the log-odds v after its last token. Reads no settings.

        loss = -y log sigmoid(v) - (1 - y) log sigmoid(-v)

    Args:
      output: The critic's value of the prefix before each token, so that the mask is at what follows a step.
      fields: `label`, 1 where the step before is right, else 0.

    Source: Lightman et al. 2023 (arXiv:2305.20050), section 2.6; Wang et al. 2024 (Math-Shepherd, arXiv:2312.08935).
    """
    logit, label = selected(output, mask), selected(fields["label"], mask)
    loss = selected(jax.nn.softplus(logit) - label * logit, mask)
    right = selected(((logit > 0) == (label > 0)).astype(loss.dtype), mask)
    return ObjectiveTerms(selected(weight, mask) * loss, {"steps/loss": loss, "steps/accuracy": right})


def solution_score(logit_S: Float[np.ndarray, "S"], reduction: Literal["min", "last", "mean", "product"]) -> float:
    """Score of a solution by the log-odds of its S steps: the least of their chances, or as `reduction` says.

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
