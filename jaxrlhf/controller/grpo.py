"""Group-relative policy optimisation: the group's mean is the baseline, no critic.

Source: Shao et al. 2024 (arXiv:2402.03300), section 4.1.
"""

import numpy as np

from jaxrlhf.algos import group_relative, kl_estimate, policy_objective, to_tokens, token_rewards
from jaxrlhf.batch import Array, Rollout, Scores
from jaxrlhf.config import GRPO, KLInReward
from jaxrlhf.controller import step as shared
from jaxrlhf.controller.step import Prepared, StepInput, StepResult
from jaxrlhf.workers import Roles


def step(roles: Roles, work: StepInput) -> StepResult:
    """One GRPO iteration."""
    settings, sampling = work.config.algorithm, work.config.rollout
    rollout = roles.actor.generate_sequences(
        work.problems, sampling.sampling, responses_per_prompt=sampling.responses_per_prompt, seed=work.seed
    )
    scores = roles.reward.compute_reward(work.problems, rollout)
    old_logp = shared.old_log_prob(roles, work, rollout)
    ref_logp = roles.reference.compute_ref_log_prob(rollout)
    prepared = shared.call(prepare, work, rollout, scores, old_logp, ref_logp)
    actor = roles.actor.update_actor(prepared.policy, objective=policy_objective, settings=settings)
    metrics = shared.merged(prepared.metrics, actor)
    return StepResult(metrics, prepared.state, rollout.result(), scores.result(), shared.value_of(old_logp))


def prepare(
    work: StepInput, rollout: Rollout, scores: Scores, old_logp_BT: Array | None, ref_logp_BT: Array
) -> Prepared:
    """Advantages within each group, cut into minibatches."""
    settings = work.config.algorithm
    assert isinstance(settings, GRPO)
    sequences = shared.scored(rollout.sequences, scores)
    mask_BT, score_B, kl = sequences.mask_BT, np.asarray(scores.score_B), settings.kl
    if isinstance(kl, KLInReward):
        logp_BT = rollout.sampler_logp_BT if old_logp_BT is None else old_logp_BT
        kl_BT = kl_estimate(logp_BT, ref_logp_BT, estimator=kl.estimator)
        coefficient = work.state["kl_coefficient"]
        score_B = np.asarray(token_rewards(score_B, kl_BT, mask_BT, kl_coefficient=coefficient)).sum(axis=1)
    advantage_B = np.asarray(
        group_relative(score_B, scores.scorable_B, sequences.prompt_id_B, normalize_std=settings.normalize_std)
    )
    metrics = shared.rollout_metrics(rollout, scores, old_logp_BT, ref_logp_BT)
    flat = np.array([advantage_B[sequences.prompt_id_B == group].any() for group in np.unique(sequences.prompt_id_B)])
    metrics |= {"kl/coefficient": work.state["kl_coefficient"], "group/flat_fraction": float(1.0 - flat.mean())}
    policy = shared.policy_minibatches(
        work,
        sequences,
        rollout,
        advantage_BT=to_tokens(advantage_B, mask_BT),
        old_logp_BT=old_logp_BT,
        ref_logp_BT=ref_logp_BT,
    )
    return Prepared(policy, [], metrics, shared.next_state(work, metrics, sequences=len(mask_BT)))
