"""Groups that are learnt from as they are complete, while others of the same step are still drawn.

Parts are of as many groups each, and which groups a part has hangs on counts of decoded tokens, so a run that is
repeated has the same numbers. Each part's gradient is taken with weights that nothing is divided by yet; their sum over
the count of the whole step is the gradient of the step.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from threading import Lock
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxrlhf import algos
from jaxrlhf.algos.weights import denominator
from jaxrlhf.batch import MinibatchRows, Problem, RolloutBatch, images_of_problems
from jaxrlhf.config import PolicyGradient, Sampling
from jaxrlhf.dataflows.batches.estimate import old_log_prob, ref_log_prob
from jaxrlhf.dataflows.batches.minibatches import Minibatches
from jaxrlhf.dataflows.batches.scored import ScoredRollout
from jaxrlhf.dataflows.step import Roles, StepInput, StepResult, call, value_of

Prepare = Callable[..., Minibatches]
"""`(rollout, scores, old_logp_BT, ref_logp_BT) -> minibatches`."""


class Later(Future[Any]):
    """A value that is computed when it is first asked for, from other futures.

    Args:
      compute: Computes it; called once.
    """

    def __init__(self, compute: Callable[[], Any]) -> None:
        super().__init__()
        self._compute, self._computing = compute, Lock()

    def result(self, timeout: float | None = None) -> Any:
        """The value, waiting for whatever it is computed from."""
        with self._computing:
            if not self.done():
                self.set_result(self._compute())
        return super().result()


class RolloutPart(NamedTuple):
    """Some groups of a step, on their way.

    Attributes:
      rollout: Future `RolloutBatch` of their responses.
      scores: Future `Scores` of those.
    """

    rollout: Any
    scores: Any


@dataclass(frozen=True)
class StreamedRollout(ScoredRollout):
    """Responses that come in parts, and all of them in the order of their problems.

    Attributes:
      parts: Parts in the order in which they are complete.
    """

    parts: Sequence[RolloutPart] = ()

    @classmethod
    def of(cls, problems: Sequence[Problem], parts: Sequence[RolloutPart]) -> "StreamedRollout":
        """The whole, which is there once all parts are."""

        def joined(name: str) -> Any:
            return in_order(problems, [part.rollout for part in parts], [getattr(part, name) for part in parts])

        def rollout() -> RolloutBatch:
            whole: RolloutBatch = joined("rollout")
            each = [problem for problem in problems for _ in range(len(whole.truncated_B) // len(problems))]
            return replace(whole, sequences=replace(whole.sequences, images_B=images_of_problems(each)))

        return cls(problems, Later(rollout), Later(partial(joined, "scores")), parts=parts)


def begun(
    roles: Roles, problems: Sequence[Problem], sampling: Sampling, *, responses_per_prompt: int, seed: int, parts: int
) -> StreamedRollout:
    """Responses to problems, in so many parts that are scored as they are complete; see `Actor.generate_part`."""
    how: dict[str, Any] = {"responses_per_prompt": responses_per_prompt, "seed": seed, "parts": parts}
    made = []
    for part in range(parts):
        rollout = roles.actor.generate_part(problems, sampling, part=part, **how)
        made.append(
            RolloutPart(rollout, roles.reward.compute_reward(Later(partial(_asked, problems, rollout)), rollout))
        )
    return StreamedRollout.of(problems, made)


def in_order(problems: Sequence[Problem], rollouts: Sequence[Any], values: Sequence[Any]) -> Any:
    """Rows of several parts as those of one batch, in the order of its problems.

    Args:
      rollouts: `RolloutBatch` of each part, or its future.
      values: What has a row for each response of a part, or its future; None stays.
    """
    prompt_id_B = np.concatenate([value_of(rollout).sequences.prompt_id_B for rollout in rollouts])
    place = {problem.prompt_id: number for number, problem in enumerate(problems)}
    order = np.argsort([place[prompt] for prompt in prompt_id_B.tolist()], kind="stable")
    parts = [_without_images(value_of(value)) for value in values]
    return jax.tree.map(lambda *rows: np.concatenate(rows)[order], *parts)


def learn_in_parts(
    roles: Roles, work: StepInput[PolicyGradient], batch: StreamedRollout, prepare: Prepare
) -> StepResult:
    """One update of the actor, each part's gradient taken as soon as that is complete."""
    estimates, trained, updates = [], [], []
    aggregation = work.settings.policy.aggregation
    for part in batch.parts:
        logps = old_log_prob(roles, work, part.rollout), ref_log_prob(roles, work, part.rollout)
        prepared: Minibatches = call(prepare, part.rollout, part.scores, *logps)
        rows = prepared.policy
        assert isinstance(rows, MinibatchRows), "they are cut from one batch"
        [sequences] = [minibatch.sequences for minibatch in rows]
        trained.append((sequences.mask_BT, sequences.prompt_id_B))
        own = denominator(*trained[-1], aggregation)
        undivided = replace(rows, weights=tuple(own * weight for weight in rows.weights))
        updates.append(roles.actor.add_gradient(undivided, objective=algos.policy_objective, settings=work.settings))
        estimates.append(logps)
    mask_BT, prompt_id_B = (np.concatenate(arrays) for arrays in zip(*trained, strict=True))
    updates.append(roles.actor.update_by_gradients(denominator(mask_BT, prompt_id_B, aggregation)))
    rollouts = [part.rollout for part in batch.parts]
    whole = [in_order(batch.problems, rollouts, values) for values in zip(*estimates, strict=True)]
    prepared = call(prepare, batch.rollout, batch.scores, *whole)  # what is told of the step is told of all of it
    return StepResult(prepared.metrics | batch.metrics, prepared.state, whole[0], updates=updates)


def _asked(problems: Sequence[Problem], rollout: Any) -> list[Problem]:
    """Problems that the responses of a part answer, in their order."""
    answered: list[int] = value_of(rollout).sequences.prompt_id_B.tolist()
    by_id = {problem.prompt_id: problem for problem in problems}
    return [by_id[prompt] for prompt in dict.fromkeys(answered)]


def _without_images(value: Any) -> Any:
    if not isinstance(value, RolloutBatch):
        return value
    return replace(value, sequences=replace(value.sequences, images_B=None))
