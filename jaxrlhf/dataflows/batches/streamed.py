"""Streamed rollouts: a step learns from complete groups while its other groups are still generated.

All parts have the same number of groups. The groups of a part depend on counts of decoded tokens, so a repeated run has
the same numbers. The gradient of each part is taken with undivided token weights; the sum of these gradients, divided
by the denominator of the whole step, is the gradient of the step.
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
    """Lazy future, computed from other futures at the first call of `result`.

    Args:
      compute: Returns the value; called once.
    """

    def __init__(self, compute: Callable[[], Any]) -> None:
        super().__init__()
        self._compute, self._computing = compute, Lock()

    def result(self, timeout: float | None = None) -> Any:
        """Return the value, waiting for the futures that it is computed from."""
        with self._computing:
            if not self.done():
                self.set_result(self._compute())
        return super().result()


class RolloutPart(NamedTuple):
    """Part of a step's groups, still being generated.

    Attributes:
      rollout: Future `RolloutBatch` of the part's responses.
      scores: Future `Scores` of the responses.
    """

    rollout: Any
    scores: Any


@dataclass(frozen=True)
class StreamedRollout(ScoredRollout):
    """Scored rollout that arrives in parts; `rollout` and `scores` hold the whole in the order of the problems.

    Attributes:
      parts: Parts in the order of completion.
    """

    parts: Sequence[RolloutPart] = ()

    @classmethod
    def of(cls, problems: Sequence[Problem], parts: Sequence[RolloutPart]) -> "StreamedRollout":
        """Make the streamed rollout of these parts; its `rollout` and `scores` wait for all parts."""

        def joined(name: str) -> Any:
            return in_order(problems, [part.rollout for part in parts], [getattr(part, name) for part in parts])

        def rollout() -> RolloutBatch:
            whole: RolloutBatch = joined("rollout")
            each = [problem for problem in problems for _ in range(len(whole.truncated_B) // len(problems))]
            return replace(whole, sequences=replace(whole.sequences, images_B=images_of_problems(each)))

        return cls(problems, Later(rollout), Later(partial(joined, "scores")), parts=parts)


def start_streaming(
    roles: Roles, problems: Sequence[Problem], sampling: Sampling, *, responses_per_prompt: int, seed: int, parts: int
) -> StreamedRollout:
    """Start generating responses in `parts` parts, each scored once complete; see `Actor.generate_part`."""
    how: dict[str, Any] = {"responses_per_prompt": responses_per_prompt, "seed": seed, "parts": parts}
    made = []
    for part in range(parts):
        rollout = roles.actor.generate_part(problems, sampling, part=part, **how)
        made.append(
            RolloutPart(rollout, roles.reward.compute_reward(Later(partial(_asked, problems, rollout)), rollout))
        )
    return StreamedRollout.of(problems, made)


def in_order(problems: Sequence[Problem], rollouts: Sequence[Any], values: Sequence[Any]) -> Any:
    """Join the rows of several parts into one batch, in the order of the problems.

    Args:
      rollouts: `RolloutBatch` of each part, or its future.
      values: Arrays of each part with one row per response, or their future; None stays None.
    """
    prompt_id_B = np.concatenate([value_of(rollout).sequences.prompt_id_B for rollout in rollouts])
    place = {problem.prompt_id: number for number, problem in enumerate(problems)}
    order = np.argsort([place[prompt] for prompt in prompt_id_B.tolist()], kind="stable")
    parts = [_without_images(value_of(value)) for value in values]
    return jax.tree.map(lambda *rows: np.concatenate(rows)[order], *parts)


def learn_in_parts(
    roles: Roles, work: StepInput[PolicyGradient], batch: StreamedRollout, prepare: Prepare
) -> StepResult:
    """Make one update of the actor, taking the gradient of each part as soon as the part is complete."""
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
    prepared = call(prepare, batch.rollout, batch.scores, *whole)  # metrics of the whole step
    return StepResult(prepared.metrics | batch.metrics, prepared.state, whole[0], updates=updates)


def _asked(problems: Sequence[Problem], rollout: Any) -> list[Problem]:
    """Return the problems that a part's responses answer, in the order of the responses."""
    answered: list[int] = value_of(rollout).sequences.prompt_id_B.tolist()
    by_id = {problem.prompt_id: problem for problem in problems}
    return [by_id[prompt] for prompt in dict.fromkeys(answered)]


def _without_images(value: Any) -> Any:
    if not isinstance(value, RolloutBatch):
        return value
    return replace(value, sequences=replace(value.sequences, images_B=None))
