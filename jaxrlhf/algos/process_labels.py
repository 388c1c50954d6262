"""Score of a solution from the scores of its steps, for process reward models."""

from typing import Literal

import numpy as np
from jaxtyping import Float


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
