"""Proximal policy optimisation: generate, score, estimate, update.

Source: Schulman et al. 2017 (arXiv:1707.06347); as a dataflow, HybridFlow (arXiv:2409.19256), Figure 6.
"""

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from jaxrlhf.algos import gae, policy_objective, value_objective, whiten
from jaxrlhf.batch import Array, Rollout, Scores
from jaxrlhf.config import PPO
from jaxrlhf.dataflows import step as shared
from jaxrlhf.dataflows.step import Metrics, Prepared, StepInput, StepResult
from jaxrlhf.single_controller.pools import Roles


def step(roles: Roles, work: StepInput) -> StepResult:
    """One PPO iteration."""
    return learn(roles, work, prepare, policy_objective)


def learn(roles: Roles, work: StepInput, prepare: Callable[..., Prepared], objective: Any) -> StepResult:
    """One iteration of an algorithm with a critic: `prepare` says what is learned, by `objective`."""
    settings, sampling = work.config.algorithm, work.config.rollout
    assert isinstance(settings, PPO)
    rollout = roles.actor.generate_sequences(
        work.problems, sampling.sampling, responses_per_prompt=sampling.responses_per_prompt, seed=work.seed
    )
    scores = roles.reward.compute_reward(work.problems, rollout)
    old_logp = shared.old_log_prob(roles, work, rollout)
    ref_logp = shared.ref_log_prob(roles, work, rollout)
    value = roles.critic.compute_values(rollout)
    prepared = shared.call(prepare, work, rollout, scores, old_logp, ref_logp, value)
    critic = roles.critic.update_critic(prepared.value, objective=value_objective, settings=settings.value)
    actor: Metrics | Future[Metrics] = {"policy/clip_fraction": 0.0}  # while the critic warms up, the policy rests
    if work.index >= settings.critic_warmup_steps:
        actor = roles.actor.update_actor(prepared.policy, objective=objective, settings=settings)
    rollout, scores, old_logp = map(shared.value_of, (rollout, scores, old_logp))
    return StepResult(prepared.metrics, prepared.state, rollout, scores, old_logp, updates=(critic, actor))


def prepare(
    work: StepInput,
    rollout: Rollout,
    scores: Scores,
    old_logp_BT: Array | None,
    ref_logp_BT: Array | None,
    value_BT: Array,
) -> Prepared:
    """Rewards per token, advantages and returns, cut into minibatches."""
    settings = work.config.algorithm
    assert isinstance(settings, PPO)
    sequences = shared.scored(rollout.sequences, scores)
    mask_BT = sequences.mask_BT
    logps: dict[str, Any] = {"old_logp_BT": old_logp_BT, "ref_logp_BT": ref_logp_BT}
    reward_BT = shared.charged_rewards(work, rollout, scores, mask_BT, **logps)
    targets = gae(reward_BT, value_BT, mask_BT, gamma=settings.gamma, lam=settings.lam)
    metrics = shared.rollout_metrics(rollout, scores, old_logp_BT, ref_logp_BT)
    metrics |= {"kl/coefficient": work.state["kl_coefficient"]}
    policy, corrected = shared.policy_minibatches(
        work,
        sequences,
        rollout,
        advantage_BT=whiten(targets.advantage_BT, mask_BT),
        **logps,
    )
    value = shared.minibatches(
        work, sequences, {"returns": targets.return_BT, "old_value": value_BT}, aggregation="token-mean"
    )
    return Prepared(policy, value, metrics | corrected, shared.next_state(work, metrics, sequences=len(mask_BT)))
