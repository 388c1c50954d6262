"""Further advantages relative to a group of responses: OPO, GPG, pass@k, online DPO.

Each calls `learn` of `grpo.py` with another advantage function; the equations are in `jaxrlhf.algos`.
"""

import numpy as np

from jaxrlhf import algos
from jaxrlhf.batch import Array
from jaxrlhf.config import GRPO, OnlineDPO, PolicyGradient
from jaxrlhf.dataflows.batches.scored import ScoredRollout
from jaxrlhf.dataflows.grpo import Returns, learn
from jaxrlhf.dataflows.step import Roles, StepInput, StepResult


def opo(roles: Roles, work: StepInput[PolicyGradient], batch: ScoredRollout) -> StepResult:
    """Learn by OPO: the advantage is the score minus the length-weighted mean of the group."""
    return learn(roles, work, batch, lambda returns: algos.length_weighted(*returns.groups, returns.length_B))


def gpg(roles: Roles, work: StepInput[PolicyGradient], batch: ScoredRollout) -> StepResult:
    """Learn by GPG: score minus the group mean, scaled up to make up for groups whose scores are all equal."""
    return learn(roles, work, batch, lambda returns: algos.group_policy_gradient(*returns.groups))


def grpo_passk(roles: Roles, work: StepInput[GRPO], batch: ScoredRollout) -> StepResult:
    """Learn by GRPO for pass@k: only the group's best response has an advantage, its lead over the second best."""
    normalize = work.settings.normalize_std
    return learn(roles, work, batch, lambda returns: algos.best_of_group(*returns.groups, normalize_std=normalize))


def online_dpo(roles: Roles, work: StepInput[OnlineDPO], batch: ScoredRollout) -> StepResult:
    """Learn by online DPO: the best response to each prompt is preferred to the worst."""

    def advantage(returns: Returns) -> Array:
        assert returns.log_ratio_BT is not None, "online DPO requires a reference"
        log_ratio_B = np.asarray(returns.log_ratio_BT).sum(axis=1)
        return algos.best_and_worst(*returns.groups, log_ratio_B, beta=work.settings.beta)

    return learn(roles, work, batch, advantage)
