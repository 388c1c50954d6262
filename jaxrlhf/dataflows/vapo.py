"""VAPO: PPO with decoupled and length-adaptive lambdas, and imitation of successful responses.

Source: Yue et al. 2025 (arXiv:2504.05118), section 3.
"""

from dataclasses import replace

import numpy as np

from jaxrlhf.algos import imitating_objective, length_adaptive_lambda, whiten
from jaxrlhf.batch import Array, Experience, RolloutBatch, Scores
from jaxrlhf.config import VAPO
from jaxrlhf.dataflows import ppo
from jaxrlhf.dataflows.batches.estimate import next_state, rewards_per_token, scorable
from jaxrlhf.dataflows.batches.minibatches import Minibatches, minibatches, policy_minibatches, trained_alone
from jaxrlhf.dataflows.batches.rollout_metrics import rollout_metrics
from jaxrlhf.dataflows.batches.scored import ScoredRollout
from jaxrlhf.dataflows.step import Roles, StepInput, StepResult


def learn(roles: Roles, work: StepInput[VAPO], batch: ScoredRollout) -> StepResult:
    """VAPO: PPO's updates, with other estimates and an objective that imitates successes."""
    return ppo.actor_critic(roles, work, batch, prepare, imitating_objective)


def prepare(
    work: StepInput[VAPO],
    rollout: RolloutBatch,
    scores: Scores,
    old_logp_BT: Array | None,
    ref_logp_BT: Array | None,
    value_BT: Array,
    trained_B: Array | None = None,
) -> Minibatches:
    """PPO's minibatches, with a lambda of their own for policy and critic and the weights of imitated tokens."""
    settings, sequences = work.settings, scorable(rollout.sequences, scores)
    mask_BT = np.asarray(sequences.mask_BT)
    reward_BT = rewards_per_token(work, rollout, scores, mask_BT, old_logp_BT, ref_logp_BT)
    lam_B = length_adaptive_lambda(ppo.action_counts(settings, rollout, mask_BT), scale=settings.length_scale)
    advantage_BT = ppo.advantages(settings, rollout, reward_BT, value_BT, mask_BT, lam=lam_B).advantage_BT
    return_BT = ppo.advantages(settings, rollout, reward_BT, value_BT, mask_BT, lam=settings.lam).return_BT
    succeeded_BT = mask_BT & (np.asarray(scores.score_B) > settings.success)[:, None]
    metrics = rollout_metrics(rollout, scores, old_logp_BT, ref_logp_BT)
    metrics |= {
        "kl/coefficient": work.state["kl_coefficient"],
        "vapo/lambda_mean": float(np.mean(lam_B)),
        "vapo/success_fraction": float(np.mean(succeeded_BT.any(axis=1))),
    }
    advantage_BT = whiten(advantage_BT, mask_BT)
    sequences = trained_alone(sequences, trained_B)
    imitated = {"imitation_weight": succeeded_BT & sequences.mask_BT}
    batches, corrected = policy_minibatches(work, sequences, rollout, advantage_BT, old_logp_BT, ref_logp_BT, imitated)
    policy = [weighted(batch, settings.imitation) for batch in batches]
    value = minibatches(work, sequences, {"returns": return_BT, "old_value": value_BT}, aggregation="token-mean")
    return Minibatches(policy, value, metrics | corrected, next_state(work, metrics, sequences=len(mask_BT)))


def weighted(batch: Experience, coefficient: float) -> Experience:
    """The minibatch with the marks of imitated tokens turned into weights over their number."""
    marked_BT = np.asarray(batch.fields["imitation_weight"])
    weight_BT = coefficient * marked_BT / max(float(marked_BT.sum()), 1.0)
    return replace(batch, fields={**batch.fields, "imitation_weight": weight_BT.astype(np.float32)})
