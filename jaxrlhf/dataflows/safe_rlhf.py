"""Safe RLHF (PPO-Lagrangian): PPO on reward minus cost, with a multiplier that keeps the mean cost below a limit.

Source: Dai et al. 2023 (arXiv:2310.12773), section 3.3 and appendix B.
"""

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial

import numpy as np

from jaxrlhf import algos
from jaxrlhf.algos import policy_objective, value_objective
from jaxrlhf.batch import Array, RolloutBatch, Scores
from jaxrlhf.batching.ragged import Experience
from jaxrlhf.config import SafeRLHF
from jaxrlhf.dataflows.batches.estimate import next_state, old_log_prob, ref_log_prob, rewards_per_token, scorable
from jaxrlhf.dataflows.batches.minibatches import Minibatches, mask_untrained, minibatches, policy_minibatches
from jaxrlhf.dataflows.batches.rollout_metrics import rollout_metrics
from jaxrlhf.dataflows.batches.scored import ScoredRollout
from jaxrlhf.dataflows.ppo import advantages
from jaxrlhf.dataflows.sft import with_examples
from jaxrlhf.dataflows.step import Metrics, Roles, StepInput, StepResult, call, value_of
from jaxrlhf.rewards.parts import part_names


def learn(roles: Roles, work: StepInput[SafeRLHF], batch: ScoredRollout) -> StepResult:
    """Update the critics of rewards and of costs, and the actor."""
    settings, rollout = work.settings, batch.rollout
    old_logp, ref_logp = old_log_prob(roles, work, rollout), ref_log_prob(roles, work, rollout)
    value, cost_value = roles.critic.compute_values(rollout), roles.cost_critic.compute_values(rollout)
    estimate = partial(prepare, work, trained_B=batch.trained_B)
    prepared = call(estimate, rollout, batch.scores, old_logp, ref_logp, value, cost_value)
    critic = roles.critic.update_critic(prepared.value, objective=value_objective, settings=settings.value)
    cost_critic = roles.cost_critic.update_critic(prepared.further, objective=value_objective, settings=settings.value)
    actor: Metrics | Future[Metrics] = {"policy/clip_fraction": 0.0}  # no policy update while the critics warm up
    if work.index >= settings.critic_warmup_steps:
        objective = policy_objective if settings.ptx is None else algos.mixed_objective
        actor = roles.actor.update_actor(prepared.policy, objective=objective, settings=settings)
    of_costs = {name.replace("value/", "cost_value/"): value for name, value in cost_critic.result().items()}
    updates = (critic, of_costs, actor)
    return StepResult(prepared.metrics | batch.metrics, prepared.state, value_of(old_logp), updates=updates)


def prepare(
    work: StepInput[SafeRLHF],
    rollout: RolloutBatch,
    scores: Scores,
    old_logp_BT: Array | None,
    ref_logp_BT: Array | None,
    value_BT: Array,
    cost_value_BT: Array,
    trained_B: Array | None = None,
) -> Minibatches:
    """Build the minibatches: one advantage of reward and cost for the actor, returns for each critic.

    `further` is for the critic of costs. With `ptx`, the actor's minibatches also hold examples.
    """
    settings = work.settings
    scores, costs = reward_and_cost(work, scores)
    sequences = scorable(rollout.sequences, scores)
    mask_BT = sequences.mask_BT
    # Payments of an environment for a turn are reward, not cost.
    paid = (rollout, scores), (replace(rollout, episodes=None), replace(costs, score_B=-costs.score_B))
    reward_BT, minus_cost_BT = (
        np.clip(
            rewards_per_token(work, sampled, scored, mask_BT, old_logp_BT, ref_logp_BT),
            -settings.clip_rewards,
            settings.clip_rewards,
        )
        for sampled, scored in paid
    )
    gain = advantages(settings, rollout, reward_BT, value_BT, mask_BT, lam=settings.lam)
    cost = advantages(settings, rollout, -minus_cost_BT, cost_value_BT, mask_BT, lam=settings.lam)
    priced = multiplier_metrics(work, costs)
    multiplier = priced["cost/multiplier"]
    advantage_BT = algos.lagrangian_advantage(gain.advantage_BT, cost.advantage_BT, multiplier=multiplier)
    advantage_BT = algos.whiten(advantage_BT, mask_BT)
    sequences = mask_untrained(sequences, trained_B)
    policy: Sequence[Experience]
    policy, corrected = policy_minibatches(work, sequences, rollout, advantage_BT, old_logp_BT, ref_logp_BT)
    if settings.ptx is not None:
        ptx = settings.ptx
        policy = with_examples(policy, work.examples, each=ptx.examples_per_update, coefficient=ptx.coefficient)
    value, cost_value = (
        minibatches(work, sequences, {"returns": returns, "old_value": old}, aggregation="token-mean")
        for returns, old in ((gain.return_BT, value_BT), (cost.return_BT, cost_value_BT))
    )
    metrics = rollout_metrics(rollout, scores, old_logp_BT, ref_logp_BT) | priced
    metrics |= {"kl/coefficient": work.state["kl_coefficient"]}
    state = next_state(work, metrics, sequences=len(mask_BT)) | {"multiplier": multiplier}
    return Minibatches(policy, value, metrics | corrected, state, cost_value)


def reward_and_cost(work: StepInput[SafeRLHF], scores: Scores) -> tuple[Scores, Scores]:
    """Return the rewards and the costs of responses; a response is scorable only if it has both."""
    cost_B = np.asarray(scores.parts[part_names(work.config.rewards.parts)[work.settings.constraint.part]])
    both_B = np.asarray(scores.scorable_B) & np.isfinite(cost_B)
    scores = replace(scores, scorable_B=both_B)
    return scores, replace(scores, score_B=np.where(both_B, cost_B, 0).astype(np.float32))


def multiplier_metrics(work: StepInput[SafeRLHF], costs: Scores) -> Metrics:
    """Return metrics of the responses' costs, and the next multiplier as `cost/multiplier`."""
    constraint, multiplier = work.settings.constraint, work.state["multiplier"]
    cost_B = np.asarray(costs.score_B)[costs.scorable_B]
    if not len(cost_B):
        return {"cost/multiplier": multiplier, "cost/mean": float("nan"), "cost/unsafe_fraction": float("nan")}
    if work.index >= constraint.delay_steps:
        multiplier = algos.next_multiplier(
            multiplier,
            float(cost_B.mean()),
            limit=constraint.limit,
            learning_rate=constraint.learning_rate,
            largest=constraint.largest_multiplier,
        )
    return {
        "cost/multiplier": multiplier,
        "cost/mean": float(cost_B.mean()),
        "cost/unsafe_fraction": float(np.mean(cost_B > 0)),
    }
