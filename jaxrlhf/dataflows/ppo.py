"""Proximal policy optimization: estimate advantages of scored responses, update critic and actor.

Source: Schulman et al. 2017 (arXiv:1707.06347); as a dataflow, HybridFlow (arXiv:2409.19256), Figure 6.
"""

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any

import numpy as np

from jaxrlhf.algos import Targets, gae, policy_objective, turn_counts, turn_gae, value_objective, whiten
from jaxrlhf.batch import Array, RolloutBatch, Scores
from jaxrlhf.config import PPO
from jaxrlhf.dataflows.batches.estimate import next_state, old_log_prob, ref_log_prob, rewards_per_token, scorable
from jaxrlhf.dataflows.batches.minibatches import Minibatches, mask_untrained, minibatches, policy_minibatches
from jaxrlhf.dataflows.batches.rollout_metrics import rollout_metrics
from jaxrlhf.dataflows.batches.scored import ScoredRollout
from jaxrlhf.dataflows.step import Metrics, Roles, StepInput, StepResult, call, value_of


def learn(roles: Roles, work: StepInput[PPO], batch: ScoredRollout) -> StepResult:
    """PPO: update the critic and the actor on the responses of a step."""
    return actor_critic(roles, work, batch, prepare, policy_objective)


def actor_critic(
    roles: Roles, work: StepInput[PPO], batch: ScoredRollout, prepare: Callable[..., Minibatches], objective: Any
) -> StepResult:
    """Update critic and actor, with an algorithm's own `prepare` and policy objective."""
    old_logp = old_log_prob(roles, work, batch.rollout)
    ref_logp = ref_log_prob(roles, work, batch.rollout)
    value = roles.critic.compute_values(batch.rollout)
    estimate = partial(prepare, work, trained_B=batch.trained_B)
    prepared = call(estimate, batch.rollout, batch.scores, old_logp, ref_logp, value)
    critic = roles.critic.update_critic(prepared.value, objective=value_objective, settings=work.settings.value)
    actor: Metrics | Future[Metrics] = {"policy/clip_fraction": 0.0}  # no policy update while the critic warms up
    if work.index >= work.settings.critic_warmup_steps:
        actor = roles.actor.update_actor(prepared.policy, objective=objective, settings=work.settings)
    return StepResult(prepared.metrics | batch.metrics, prepared.state, value_of(old_logp), updates=(critic, actor))


def prepare(
    work: StepInput[PPO],
    rollout: RolloutBatch,
    scores: Scores,
    old_logp_BT: Array | None,
    ref_logp_BT: Array | None,
    value_BT: Array,
    trained_B: Array | None = None,
    *,
    lam: Array | None = None,
    marks: Mapping[str, Array] | None = None,
) -> Minibatches:
    """Compute rewards per token, whitened advantages and returns, and build the minibatches.

    Args:
      lam: Lambda of the policy's advantages; None takes the lambda of the critic's returns.
      marks: `[B, T]` arrays by name, further fields for the actor's objective.
    """
    settings, sequences = work.settings, scorable(rollout.sequences, scores)
    mask_BT = sequences.mask_BT
    reward_BT = rewards_per_token(work, rollout, scores, mask_BT, old_logp_BT, ref_logp_BT)
    targets = advantages(settings, rollout, reward_BT, value_BT, mask_BT, lam=settings.lam)
    own = targets if lam is None else advantages(settings, rollout, reward_BT, value_BT, mask_BT, lam=lam)
    advantage_BT = whiten(own.advantage_BT, mask_BT)
    sequences = mask_untrained(sequences, trained_B)
    policy, corrected = policy_minibatches(work, sequences, rollout, advantage_BT, old_logp_BT, ref_logp_BT, marks)
    fields = {"returns": targets.return_BT, "old_value": value_BT}
    value = minibatches(work, sequences, fields, aggregation="token-mean")
    metrics = rollout_metrics(rollout, scores, old_logp_BT, ref_logp_BT)
    metrics |= {"kl/coefficient": work.state["kl_coefficient"]}
    return Minibatches(policy, value, metrics | corrected, next_state(work, metrics, sequences=len(mask_BT)))


def advantages(
    settings: PPO, rollout: RolloutBatch, reward_BT: Array, value_BT: Array, mask_BT: Array, *, lam: float | Array
) -> Targets:
    """Compute GAE over the settings' actions: tokens, or turns of an episode."""
    if settings.actions == "tokens":
        return gae(reward_BT, value_BT, mask_BT, gamma=settings.gamma, lam=lam)
    assert rollout.episodes is not None, "the configuration requires an environment for turns"
    return turn_gae(reward_BT, value_BT, mask_BT, rollout.episodes.turn_BT, gamma=settings.gamma, lam=lam)


def action_counts(settings: PPO, rollout: RolloutBatch, mask_BT: Array) -> np.ndarray:
    """Count the actions of each row: tokens, or turns of an episode."""
    if settings.actions == "tokens" or rollout.episodes is None:
        return np.count_nonzero(mask_BT, axis=1)
    return turn_counts(mask_BT, rollout.episodes.turn_BT)
