"""On-policy distillation: the student samples, and a teacher says of each token how much likelier it finds it.

    A_t = log pi_teacher(y_t | y_<t) - log pi_student(y_t | y_<t)

Its mean is minus the reverse KL, and following it token by token lowers that.

Source: Agarwal et al. 2024 (arXiv:2306.13649), reverse KL on the student's own samples; as an
advantage: Thinking Machines Lab 2025, "On-policy distillation".
"""

from functools import partial
from typing import Any

import numpy as np

from jaxrlhf.algos import kl_estimate, policy_objective, selected
from jaxrlhf.batch import Array, Rollout, Scores
from jaxrlhf.dataflows import step as shared
from jaxrlhf.dataflows.step import Prepared, StepInput, StepResult
from jaxrlhf.single_controller.pools import Roles


def step(roles: Roles, work: StepInput) -> StepResult:
    """One iteration of on-policy distillation."""
    sampling = work.config.rollout
    rollout = roles.actor.generate_sequences(
        work.problems, sampling.sampling, responses_per_prompt=sampling.responses_per_prompt, seed=work.seed
    )
    scores = roles.reward.compute_reward(work.problems, rollout)
    old_logp = shared.old_log_prob(roles, work, rollout)
    teacher_logp = roles.reference.compute_ref_log_prob(rollout)
    prepared = shared.call(partial(prepare, work), rollout, scores, old_logp, teacher_logp)
    actor = roles.actor.update_actor(prepared.policy, objective=policy_objective, settings=work.config.algorithm)
    rollout, scores, old_logp = map(shared.value_of, (rollout, scores, old_logp))
    return StepResult(prepared.metrics, prepared.state, rollout, scores, old_logp, updates=(actor,))


def prepare(
    work: StepInput, rollout: Rollout, scores: Scores, old_logp_BT: Array | None, teacher_logp_BT: Array
) -> Prepared:
    """The advantage of each token, cut into minibatches; responses without a score are trained on too."""
    mask_BT = rollout.sequences.mask_BT
    logp_BT = rollout.sampler_logp_BT if old_logp_BT is None else old_logp_BT
    advantage_BT = -np.asarray(selected(kl_estimate(logp_BT, teacher_logp_BT, estimator="k1"), mask_BT))
    logps: dict[str, Any] = {"old_logp_BT": old_logp_BT, "ref_logp_BT": teacher_logp_BT}
    policy, corrected = shared.policy_minibatches(work, rollout.sequences, rollout, advantage_BT=advantage_BT, **logps)
    metrics = shared.rollout_metrics(rollout, scores, old_logp_BT, teacher_logp_BT)
    return Prepared(policy, [], metrics | corrected, shared.next_state(work, metrics, sequences=len(mask_BT)))
