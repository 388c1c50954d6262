"""The step of every algorithm without a critic: generate, score, learn.

What tells them apart is the advantage, a function of what the responses earned. Those of the
package are in `jaxrlhf.dataflows.baselines`; yours is another function.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxrlhf.algos import policy_objective, to_tokens
from jaxrlhf.batch import Array, Rollout, Scores
from jaxrlhf.config import Refusal
from jaxrlhf.dataflows import step as shared
from jaxrlhf.dataflows.step import Prepared, StepInput, StepResult
from jaxrlhf.single_controller.pools import Roles


@dataclass(frozen=True)
class Rewarded:
    """A step's responses and what they earned: what an advantage is a function of.

    Attributes:
      reward_BT: Paid when token t is emitted, KL penalty already subtracted.
      mask_BT: Chosen tokens of scorable responses.
      scorable_B: Rows that have a score; the others take part in nothing.
      prompt_id_B: Rows with the same id answer the same prompt.
    """

    reward_BT: Array
    mask_BT: Array
    scorable_B: Array
    prompt_id_B: Array

    @property
    def score_B(self) -> np.ndarray:
        """What each response earned in all."""
        return np.asarray(self.reward_BT).sum(axis=1)

    @property
    def length_B(self) -> np.ndarray:
        """Chosen tokens of each response."""
        return np.asarray(self.mask_BT).sum(axis=1)

    @property
    def groups(self) -> tuple[Array, Array, Array]:
        """What estimates that compare the responses to one prompt take first: scores, which there are, and of whom."""
        return self.score_B, self.scorable_B, self.prompt_id_B


Advantage = Callable[[Rewarded], Array]
"""The advantage of each response, `[B]`, or of each token, `[B, T]` and 0 outside the mask."""


def step(roles: Roles, work: StepInput, advantage: Advantage) -> StepResult:
    """Generate, score and learn: one iteration of any algorithm without a critic."""
    sampling = work.config.rollout
    rollout = roles.actor.generate_sequences(
        work.problems, sampling.sampling, responses_per_prompt=sampling.responses_per_prompt, seed=work.seed
    )
    scores = roles.reward.compute_reward(work.problems, rollout)
    return learn(roles, work, rollout, scores, advantage)


def learn(
    roles: Roles, work: StepInput, rollout: Any, scores: Any, advantage: Advantage, *, trained_B: Array | None = None
) -> StepResult:
    """The part of a step that comes after scoring.

    Args:
      rollout: A `Rollout`, or a future of one.
      scores: Of it, idem.
      trained_B: Rows that are trained on, of those that are scorable; all take part in baselines. None is all.
    """
    old_logp = shared.old_log_prob(roles, work, rollout)
    ref_logp = shared.ref_log_prob(roles, work, rollout)
    prepared = shared.call(partial(prepare, work, advantage, trained_B), rollout, scores, old_logp, ref_logp)
    actor = roles.actor.update_actor(prepared.policy, objective=policy_objective, settings=work.config.algorithm)
    rollout, scores, old_logp = map(shared.value_of, (rollout, scores, old_logp))
    return StepResult(prepared.metrics, prepared.state, rollout, scores, old_logp, updates=(actor,))


def prepare(
    work: StepInput,
    advantage: Advantage,
    trained_B: Array | None,
    rollout: Rollout,
    scores: Scores,
    old_logp_BT: Array | None,
    ref_logp_BT: Array | None,
) -> Prepared:
    """Rewards and advantages, cut into minibatches."""
    sequences = shared.scored(rollout.sequences, scores)
    mask_BT, prompt_id_B = sequences.mask_BT, np.asarray(sequences.prompt_id_B)
    logps: dict[str, Any] = {"old_logp_BT": old_logp_BT, "ref_logp_BT": ref_logp_BT}
    reward_BT = shared.charged_rewards(work, rollout, scores, mask_BT, **logps)
    found = _checked(advantage(Rewarded(reward_BT, mask_BT, scores.scorable_B, prompt_id_B)), mask_BT, work)
    advantage_BT = to_tokens(found, mask_BT) if found.ndim == 1 else found
    moved_B = np.asarray(np.any(advantage_BT, axis=1))
    flat = [not moved_B[prompt_id_B == prompt].any() for prompt in np.unique(prompt_id_B)]
    metrics = shared.rollout_metrics(rollout, scores, old_logp_BT, ref_logp_BT)
    metrics |= {"kl/coefficient": work.state["kl_coefficient"], "group/flat_fraction": float(np.mean(flat))}
    if trained_B is not None:
        sequences = replace(sequences, mask_BT=mask_BT & np.asarray(trained_B)[:, None])
    policy, corrected = shared.policy_minibatches(work, sequences, rollout, advantage_BT=advantage_BT, **logps)
    return Prepared(policy, [], metrics | corrected, shared.next_state(work, metrics, sequences=len(mask_BT)))


def _checked(found: Any, mask_BT: Array, work: StepInput) -> np.ndarray:
    """What an advantage function returned, as an array.

    Raises:
      Refusal: It is not one finite number for each response, or for each token.
    """
    given, (rows, tokens) = np.asarray(found), mask_BT.shape
    finite = jnp.issubdtype(given.dtype, jnp.number) and bool(np.isfinite(given).all())
    if not finite or given.shape not in ((rows,), (rows, tokens)):
        raise Refusal(
            f"the advantage of {type(work.config.algorithm).__name__} is of shape {given.shape} and {given.dtype}, "
            f"{'all finite' if finite else 'not all finite numbers'}; it has to be one finite number for each of "
            f"{rows} responses, or for each of their {tokens} tokens and 0 outside the mask"
        )
    return given
