"""Critic-free policy gradients: GRPO, Dr. GRPO, RLOO, REINFORCE++.

The algorithms share `learn` and differ in the advantage, a function of the responses' returns. The equations are in
`jaxrlhf.algos`. An algorithm of yours calls `learn` with another advantage function.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxrlhf import algos
from jaxrlhf.batch import Array, EpisodeRows, RolloutBatch, Scores
from jaxrlhf.config import GRPO, KLInReward, PolicyGradient, Refusal, ReinforcePlusPlus
from jaxrlhf.dataflows.batches.estimate import next_state, old_log_prob, ref_log_prob, rewards_per_token, scorable
from jaxrlhf.dataflows.batches.minibatches import Minibatches, mask_untrained, policy_minibatches
from jaxrlhf.dataflows.batches.rollout_metrics import flat_groups, rollout_metrics
from jaxrlhf.dataflows.batches.scored import ScoredRollout
from jaxrlhf.dataflows.step import Roles, StepInput, StepResult, call, value_of


@dataclass(frozen=True)
class Returns:
    """Rewards of a step's responses: the argument of an advantage function.

    Attributes:
      reward_BT: Reward of emitting token t, KL penalty already subtracted.
      mask_BT: bool, tokens of scorable responses.
      scorable_B: bool, rows that have a score; rows without a score take part in nothing.
      prompt_id_B: Group key: rows with the same id answer the same prompt.
      episodes: Turns of episodes; None if rows are responses to a prompt.
      log_ratio_BT: log pi_old - log pi_ref of each token, 0 outside the mask; None without a reference.
      reported_B: Score of each row as reported, so that equal scores stay equal to the last digit; None sums
        `reward_BT`.
      logp_BT: Log-probabilities of the old policy, 0 outside the mask; None if they are not known.
      recorded: Columns that the sampler recorded, as in `Sequences.recorded`.
    """

    reward_BT: Array
    mask_BT: Array
    scorable_B: Array
    prompt_id_B: Array
    episodes: EpisodeRows | None = None
    log_ratio_BT: Array | None = None
    reported_B: Array | None = None
    logp_BT: Array | None = None
    recorded: Mapping[str, Array] = field(default_factory=dict)

    @property
    def score_B(self) -> np.ndarray:
        """Sum of each response's rewards."""
        return np.asarray(self.reward_BT).sum(axis=1) if self.reported_B is None else np.asarray(self.reported_B)

    @property
    def length_B(self) -> np.ndarray:
        """Number of tokens of each response."""
        return np.asarray(self.mask_BT).sum(axis=1)

    @property
    def groups(self) -> tuple[Array, Array, Array]:
        """Scores, scorable rows and prompt ids: the first arguments of group baselines."""
        return self.score_B, self.scorable_B, self.prompt_id_B


Advantage = Callable[[Returns], Array]
"""Function that returns the advantage of each response, `[B]`, or of each token, `[B, T]` and 0 outside the mask."""

LossFields = Callable[[Returns, Array], Mapping[str, Array]]
"""Function of the returns and the advantages, `[B, T]`, that returns further `[B, T]` arrays which a loss reads."""


def grpo(roles: Roles, work: StepInput[GRPO], batch: ScoredRollout) -> StepResult:
    """Learn by GRPO: score minus the group mean, over the group's standard deviation; undivided it is Dr. GRPO."""
    normalize = work.settings.normalize_std
    return learn(roles, work, batch, lambda returns: algos.group_relative(*returns.groups, normalize_std=normalize))


def rloo(roles: Roles, work: StepInput[PolicyGradient], batch: ScoredRollout) -> StepResult:
    """Learn by RLOO: the advantage is the score minus the mean of the other responses of the group."""
    return learn(roles, work, batch, lambda returns: algos.rloo(*returns.groups))


def reinforce_plus_plus(roles: Roles, work: StepInput[ReinforcePlusPlus], batch: ScoredRollout) -> StepResult:
    """Learn by REINFORCE++: the advantage is the return of each token, whitened over the batch; no groups."""

    def advantage(returns: Returns) -> Array:
        return_BT = algos.discounted_returns(returns.reward_BT, returns.mask_BT, gamma=work.settings.gamma)
        return algos.whiten(return_BT, returns.mask_BT)

    return learn(roles, work, batch, advantage)


def reinforce_plus_plus_baseline(roles: Roles, work: StepInput[PolicyGradient], batch: ScoredRollout) -> StepResult:
    """Learn by REINFORCE++-baseline: the advantage is the score minus the group mean, whitened over the batch."""

    def advantage(returns: Returns) -> Array:
        centred_B = algos.group_relative(*returns.groups, normalize_std=False)
        return algos.whiten(algos.to_tokens(centred_B, returns.mask_BT), returns.mask_BT)

    return learn(roles, work, batch, advantage)


def learn(
    roles: Roles,
    work: StepInput[PolicyGradient],
    batch: ScoredRollout,
    advantage: Advantage,
    *,
    objective: Callable[..., Any] = algos.policy_objective,
    loss_fields: LossFields | None = None,
) -> StepResult:
    """Estimate advantages of scored responses and update the actor.

    Args:
      objective: Training objective of the actor, as in `jaxrlhf.algos.objectives`.
      loss_fields: Function that returns further fields for the objective; None has no further fields.
    """
    old_logp, ref_logp = old_log_prob(roles, work, batch.rollout), ref_log_prob(roles, work, batch.rollout)
    estimate = partial(prepare, work, advantage, batch.trained_B, loss_fields=loss_fields)
    prepared = call(estimate, batch.rollout, batch.scores, old_logp, ref_logp)
    actor = roles.actor.update_actor(prepared.policy, objective=objective, settings=work.settings)
    return StepResult(prepared.metrics | batch.metrics, prepared.state, value_of(old_logp), updates=(actor,))


def prepare(
    work: StepInput[PolicyGradient],
    advantage: Advantage,
    trained_B: Array | None,
    rollout: RolloutBatch,
    scores: Scores,
    old_logp_BT: Array | None,
    ref_logp_BT: Array | None,
    *,
    loss_fields: LossFields | None = None,
) -> Minibatches:
    """Compute rewards and advantages, and build the minibatches."""
    sequences = scorable(rollout.sequences, scores)
    mask_BT, prompt_id_B = sequences.mask_BT, np.asarray(sequences.prompt_id_B)
    reward_BT = rewards_per_token(work, rollout, scores, mask_BT, old_logp_BT, ref_logp_BT)
    logp_BT = rollout.sampler_logp_BT if old_logp_BT is None else old_logp_BT
    both = None if ref_logp_BT is None else [np.where(mask_BT, x, 0) for x in (logp_BT, ref_logp_BT)]
    log_ratio_BT = None if both is None else np.subtract(*both)
    reported_B = None if rollout.episodes is None or isinstance(work.settings.kl, KLInReward) else scores.score_B
    returns = Returns(
        reward_BT,
        mask_BT,
        scores.scorable_B,
        prompt_id_B,
        rollout.episodes,
        log_ratio_BT,
        reported_B,
        np.where(mask_BT, logp_BT, 0),
        rollout.sequences.recorded,
    )
    given = _checked(advantage(returns), mask_BT, work)
    advantage_BT = algos.to_tokens(given, mask_BT) if given.ndim == 1 else given
    metrics = rollout_metrics(rollout, scores, old_logp_BT, ref_logp_BT)
    metrics |= {"kl/coefficient": work.state["kl_coefficient"], **flat_groups(advantage_BT, prompt_id_B)}
    sequences = mask_untrained(sequences, trained_B)
    fields = loss_fields(returns, advantage_BT) if loss_fields is not None else {}
    policy, corrected = policy_minibatches(work, sequences, rollout, advantage_BT, old_logp_BT, ref_logp_BT, fields)
    return Minibatches(policy, [], metrics | corrected, next_state(work, metrics, sequences=len(mask_BT)))


def _checked(returned: Any, mask_BT: Array, work: StepInput[PolicyGradient]) -> np.ndarray:
    """Return the result of an advantage function as an array.

    Raises:
      Refusal: The result is not one finite number for each response, or for each token.
    """
    given, (rows, tokens) = np.asarray(returned), mask_BT.shape
    finite = jnp.issubdtype(given.dtype, jnp.number) and bool(np.isfinite(given).all())
    if not finite or given.shape not in ((rows,), (rows, tokens)):
        raise Refusal(
            f"the advantage of {type(work.settings).__name__} has shape {given.shape} and dtype {given.dtype}, "
            f"{'all finite' if finite else 'not all finite numbers'}; expected one finite number for each of {rows} "
            f"responses, or for each of their {tokens} tokens with 0 outside of the mask"
        )
    return given
