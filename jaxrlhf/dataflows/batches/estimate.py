"""Log-probabilities, rewards per token and the KL coefficient of a step."""

from dataclasses import replace
from typing import Any

import numpy as np

from jaxrlhf.algos import adaptive_kl_coefficient, kl_estimate, token_rewards
from jaxrlhf.batch import Array, RolloutBatch, Scores, Sequences
from jaxrlhf.config import KLInReward, PolicyGradient
from jaxrlhf.dataflows.step import Metrics, Roles, State, StepInput


def old_log_prob(roles: Roles, work: StepInput[PolicyGradient], rollout: Any) -> Any:
    """Compute the actor's log-probabilities of a rollout; None if the sampler's log-probabilities are used."""
    return None if work.settings.trusts_sampler(work.config.rollout) else roles.actor.compute_log_prob(rollout)


def ref_log_prob(roles: Roles, work: StepInput[PolicyGradient], rollout: Any) -> Any:
    """Compute the reference's log-probabilities of a rollout; None if the algorithm has no reference."""
    return roles.reference.compute_ref_log_prob(rollout) if "reference" in work.config.roles else None


def scorable(sequences: Sequences, scores: Scores) -> Sequences:
    """Remove unscorable rows from the training mask of sequences."""
    mask_BT = np.asarray(sequences.mask_BT) & np.asarray(scores.scorable_B)[:, None]
    return replace(sequences, mask_BT=mask_BT)


def rewards_per_token(
    work: StepInput[PolicyGradient],
    rollout: RolloutBatch,
    scores: Scores,
    mask_BT: Array,
    old_logp_BT: Array | None,
    ref_logp_BT: Array | None,
) -> Array:
    """Compute `reward_BT`: the score at each response's last token, minus the KL penalty if the KL is in the reward.

    An environment's reward for a turn is at the turn's last token; the rest of the score is at the end.

    Args:
      mask_BT: bool, tokens of scorable responses.
    """
    kl, kl_BT, coefficient, score_B = work.settings.kl, None, 0.0, scores.score_B
    if isinstance(kl, KLInReward):
        assert ref_logp_BT is not None, "a KL requires the reference"
        logp_BT = rollout.sampler_logp_BT if old_logp_BT is None else old_logp_BT
        kl_BT = kl_estimate(logp_BT, ref_logp_BT, estimator=kl.estimator)
        coefficient = work.state["kl_coefficient"]
    if rollout.episodes is None:
        return token_rewards(score_B, kl_BT, mask_BT, kl_coefficient=coefficient)
    paid_BT = np.where(mask_BT, rollout.episodes.reward_BT, 0)
    rest_B = np.asarray(score_B) - paid_BT.sum(axis=1)
    return token_rewards(rest_B, kl_BT, mask_BT, kl_coefficient=coefficient) + paid_BT


def next_state(work: StepInput[PolicyGradient], metrics: Metrics, *, sequences: int) -> State:
    """Return the algorithm's state for the next step, with the KL coefficient updated if it is adaptive.

    Args:
      sequences: Number of responses of the step.
    """
    kl, state = work.settings.kl, dict(work.state)
    if kl is not None and kl.adaptive is not None:
        state["kl_coefficient"] = adaptive_kl_coefficient(
            state["kl_coefficient"],
            metrics["kl/ref_sequence_mean"],
            target=kl.adaptive.target,
            horizon=kl.adaptive.horizon,
            sequences=sequences,
        )
    return state
