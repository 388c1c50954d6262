"""On-policy distillation: the student samples, and the advantage compares its log-probabilities with a teacher's.

    A_t = log pi_teacher(y_t | y_<t) - log pi_student(y_t | y_<t)

The mean advantage is minus the reverse KL, so following the advantage token by token lowers the reverse KL.

Source: Agarwal et al. 2024 (arXiv:2306.13649), reverse KL on the student's own samples; as an
advantage: Thinking Machines Lab 2025, "On-policy distillation".
"""

from functools import partial

import numpy as np

from jaxrlhf.algos import kl_estimate, policy_objective, selected
from jaxrlhf.batch import Array, RolloutBatch, Scores
from jaxrlhf.config import PolicyGradient
from jaxrlhf.dataflows.batches.estimate import next_state, old_log_prob
from jaxrlhf.dataflows.batches.minibatches import Minibatches, mask_untrained, policy_minibatches
from jaxrlhf.dataflows.batches.rollout_metrics import rollout_metrics
from jaxrlhf.dataflows.batches.scored import ScoredRollout
from jaxrlhf.dataflows.step import Roles, StepInput, StepResult, call, value_of


def learn(roles: Roles, work: StepInput[PolicyGradient], batch: ScoredRollout) -> StepResult:
    """Update the student; the advantage is the teacher's log-probability minus the student's, token by token."""
    old_logp = old_log_prob(roles, work, batch.rollout)
    teacher_logp = roles.reference.compute_ref_log_prob(batch.rollout)
    estimate = partial(prepare, work, trained_B=batch.trained_B)
    prepared = call(estimate, batch.rollout, batch.scores, old_logp, teacher_logp)
    actor = roles.actor.update_actor(prepared.policy, objective=policy_objective, settings=work.settings)
    return StepResult(prepared.metrics | batch.metrics, prepared.state, value_of(old_logp), updates=(actor,))


def prepare(
    work: StepInput[PolicyGradient],
    rollout: RolloutBatch,
    scores: Scores,
    old_logp_BT: Array | None,
    teacher_logp_BT: Array,
    trained_B: Array | None = None,
) -> Minibatches:
    """Compute the advantage of each token and build the minibatches; responses without a score are trained on too."""
    sequences, mask_BT = rollout.sequences, rollout.sequences.mask_BT
    logp_BT = rollout.sampler_logp_BT if old_logp_BT is None else old_logp_BT
    advantage_BT = -np.asarray(selected(kl_estimate(logp_BT, teacher_logp_BT, estimator="k1"), mask_BT))
    sequences = mask_untrained(sequences, trained_B)
    policy, corrected = policy_minibatches(work, sequences, rollout, advantage_BT, old_logp_BT, teacher_logp_BT)
    metrics = rollout_metrics(rollout, scores, old_logp_BT, teacher_logp_BT)
    return Minibatches(policy, [], metrics | corrected, next_state(work, metrics, sequences=len(mask_BT)))
