"""VAPO: PPO whose policy and critic look ahead by different lambdas, and which imitates what succeeded.

Source: Yue et al. 2025 (arXiv:2504.05118), section 3.
"""

from dataclasses import replace
from typing import Any

import numpy as np

from jaxrlhf.algos import gae, imitating_objective, length_adaptive_lambda, whiten
from jaxrlhf.batch import Array, Experience, Rollout, Scores
from jaxrlhf.config import VAPO
from jaxrlhf.dataflows import ppo
from jaxrlhf.dataflows import step as shared
from jaxrlhf.dataflows.step import Prepared, StepInput, StepResult
from jaxrlhf.single_controller.pools import Roles


def step(roles: Roles, work: StepInput) -> StepResult:
    """One VAPO iteration."""
    return ppo.learn(roles, work, prepare, imitating_objective)


def prepare(
    work: StepInput,
    rollout: Rollout,
    scores: Scores,
    old_logp_BT: Array | None,
    ref_logp_BT: Array | None,
    value_BT: Array,
) -> Prepared:
    """As PPO's, with decoupled lambdas and the weights of imitation."""
    settings = work.config.algorithm
    assert isinstance(settings, VAPO)
    sequences = shared.scored(rollout.sequences, scores)
    mask_BT = np.asarray(sequences.mask_BT)
    logps: dict[str, Any] = {"old_logp_BT": old_logp_BT, "ref_logp_BT": ref_logp_BT}
    reward_BT = shared.charged_rewards(work, rollout, scores, mask_BT, **logps)
    lam_B = length_adaptive_lambda(mask_BT.sum(axis=1), scale=settings.length_scale)
    advantage_BT = gae(reward_BT, value_BT, mask_BT, gamma=settings.gamma, lam=lam_B).advantage_BT
    return_BT = gae(reward_BT, value_BT, mask_BT, gamma=settings.gamma, lam=settings.lam).return_BT
    succeeded_BT = mask_BT & (np.asarray(scores.score_B) > settings.success)[:, None]
    metrics = shared.rollout_metrics(rollout, scores, old_logp_BT, ref_logp_BT)
    metrics |= {
        "kl/coefficient": work.state["kl_coefficient"],
        "vapo/lambda_mean": float(np.mean(lam_B)),
        "vapo/success_fraction": float(np.mean(succeeded_BT.any(axis=1))),
    }
    policy, corrected = shared.policy_minibatches(
        work,
        sequences,
        rollout,
        advantage_BT=whiten(advantage_BT, mask_BT),
        further={"imitation_weight": succeeded_BT},
        **logps,
    )
    policy = [weighted(batch, settings.imitation) for batch in policy]
    value = shared.minibatches(work, sequences, {"returns": return_BT, "old_value": value_BT}, aggregation="token-mean")
    return Prepared(policy, value, metrics | corrected, shared.next_state(work, metrics, sequences=len(mask_BT)))


def weighted(batch: Experience, coefficient: float) -> Experience:
    """The minibatch with the marks of imitated tokens turned into weights over their number."""
    marked_BT = np.asarray(batch.fields["imitation_weight"])
    weight_BT = coefficient * marked_BT / max(float(marked_BT.sum()), 1.0)
    return replace(batch, fields={**batch.fields, "imitation_weight": weight_BT.astype(np.float32)})
