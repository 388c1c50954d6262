"""VAPO: PPO with decoupled and length-adaptive lambdas, and imitation of successful responses.

Source: Yue et al. 2025 (arXiv:2504.05118), section 3.
"""

from dataclasses import replace
from typing import Any

import numpy as np

from jaxrlhf.algos import imitating_objective, length_adaptive_lambda
from jaxrlhf.batch import Array, RolloutBatch, Scores
from jaxrlhf.batching.ragged import Experience
from jaxrlhf.config import VAPO
from jaxrlhf.dataflows import ppo
from jaxrlhf.dataflows.batches.estimate import scorable
from jaxrlhf.dataflows.batches.minibatches import Minibatches, mask_untrained
from jaxrlhf.dataflows.batches.scored import ScoredRollout
from jaxrlhf.dataflows.step import Roles, StepInput, StepResult


def learn(roles: Roles, work: StepInput[VAPO], batch: ScoredRollout) -> StepResult:
    """Update critic and actor as PPO does, with VAPO's estimates and an objective that imitates successes."""
    return ppo.actor_critic(roles, work, batch, prepare, imitating_objective)


def prepare(
    work: StepInput[VAPO], rollout: RolloutBatch, scores: Scores, *outputs: Any, trained_B: Array | None = None
) -> Minibatches:
    """Build PPO's minibatches with separate lambdas for policy and critic, and with weights of imitated tokens.

    Args:
      outputs: Log-probabilities under the actor and the reference, and the critic's values.
    """
    settings, sequences = work.settings, scorable(rollout.sequences, scores)
    mask_BT = np.asarray(sequences.mask_BT)
    lam_B = length_adaptive_lambda(ppo.action_counts(settings, rollout, mask_BT), scale=settings.length_scale)
    succeeded_BT = mask_BT & (np.asarray(scores.score_B) > settings.success)[:, None]
    marks = {"imitation_weight": succeeded_BT & mask_untrained(sequences, trained_B).mask_BT}
    prepared = ppo.prepare(work, rollout, scores, *(*outputs, trained_B), lam=lam_B, marks=marks)
    metrics = prepared.metrics | {
        "vapo/lambda_mean": float(np.mean(lam_B)),
        "vapo/success_fraction": float(np.mean(succeeded_BT.any(axis=1))),
    }
    return replace(prepared, policy=[weighted(batch, settings.imitation) for batch in prepared.policy], metrics=metrics)


def weighted(minibatch: Experience, coefficient: float) -> Experience:
    """Turn the marks of imitated tokens into weights: the coefficient divided by the number of marked tokens."""
    marked = minibatch.batch.columns["fields"]["imitation_weight"]
    weight = coefficient * marked / max(float(marked.sum()), 1.0)
    return minibatch.with_fields({"imitation_weight": weight.astype(np.float32)})
