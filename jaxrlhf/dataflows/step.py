"""What a step is given and gives back, and the array maths that algorithms share."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np

from jaxrlhf.algos import (
    adaptive_kl_coefficient,
    kl_estimate,
    masked_mean,
    rollout_correction,
    sampler_gap,
    token_rewards,
    token_weights,
)
from jaxrlhf.batch import Array, Experience, Problem, Rollout, Scores, Sequences
from jaxrlhf.config import Aggregation, Config, KLInLoss, KLInReward, PolicyGradient
from jaxrlhf.single_controller.pools import Roles

Metrics = dict[str, float]
State = dict[str, float]


@dataclass(frozen=True)
class StepInput:
    """One step's work.

    Attributes:
      config: Of the run.
      problems: This step's records.
      index: 0 for the first step of the run.
      state: What the algorithm carries from step to step.
      more: Draws as many records again; the run's data position moves on with every call.
      examples: Of the algorithm's own data, if it has some.
    """

    config: Config
    problems: Sequence[Problem]
    index: int
    state: Mapping[str, float]
    more: Callable[[], Sequence[Problem]] | None = None
    examples: Sequence[Problem] = ()

    @property
    def seed(self) -> int:
        """Differs from step to step and from run to run."""
        return int(np.random.SeedSequence([self.config.seed, self.index]).generate_state(1)[0] >> 1)


@dataclass(frozen=True)
class StepResult:
    """What one step leaves behind.

    Attributes:
      metrics: Numbers for the log.
      state: For the next step.
      rollout: For the samples file; None where nothing was generated.
      scores: Of that rollout.
      logp_BT: The trainer's log-probabilities of it.
      problems: That the rollout answers; None is those of the step's input.
      updates: What models report that may still be trained; it joins the metrics.
    """

    metrics: Metrics
    state: State = field(default_factory=dict)
    rollout: Rollout | None = None
    scores: Scores | None = None
    logp_BT: Array | None = None
    problems: Sequence[Problem] | None = None
    updates: Sequence[Metrics | Future[Metrics]] = ()

    def settled(self) -> "StepResult":
        """The same once all models are trained, with what they report among the metrics."""
        return replace(self, metrics=merged(self.metrics, *self.updates), updates=())


@dataclass(frozen=True)
class Prepared:
    """A rollout turned into updates.

    Attributes:
      policy: Minibatches for the actor, over all epochs.
      value: Minibatches for the critic; empty without one.
      metrics: Of the rollout and its advantages.
      state: For the next step.
    """

    policy: list[Experience]
    value: list[Experience]
    metrics: Metrics
    state: State


def merged(*parts: Metrics | Future[Metrics]) -> Metrics:
    """One dict out of several that share no name, waiting for those that are futures."""
    together: Metrics = {}
    for part in parts:
        ready = part.result() if isinstance(part, Future) else part
        assert not together.keys() & ready.keys(), f"two parts report {sorted(together.keys() & ready.keys())}"
        together |= ready
    return together


def minibatches(
    step: StepInput,
    sequences: Sequences,
    fields: Mapping[str, Array],
    *,
    aggregation: Aggregation,
    importance_BT: Array | None = None,
    kl_coefficient: float = 0.0,
    entropy_coefficient: float = 0.0,
) -> list[Experience]:
    """Shuffled minibatches of every epoch, each with weights over its own denominators.

    Rows are drawn by the step's seed alone, so roles that are trained on one rollout see the
    same rows in the same order. A minibatch without a token to train on is left out, as long as there is another:
    an optimizer goes on by its momentum where the gradient is 0.
    """
    settings = step.config.algorithm
    assert isinstance(settings, PolicyGradient)
    horizon = float(step.config.rollout.max_response_tokens)
    trained_B = np.asarray(np.any(sequences.mask_BT, axis=1))
    batches = []
    for epoch in range(settings.epochs_per_step):
        order = np.random.default_rng([step.seed, epoch]).permutation(len(trained_B))
        rows_of = order.reshape(-1, settings.responses_per_update)
        for rows in [rows for rows in rows_of if trained_B[rows].any()] or rows_of[:1]:
            part = jax.tree.map(lambda x, rows=rows: np.asarray(x)[rows], sequences)
            weight_BT = np.asarray(
                token_weights(part.mask_BT, part.prompt_id_B, aggregation=aggregation, horizon=horizon)
            )
            extra = {"kl_weight": kl_coefficient * weight_BT} if kl_coefficient else {}
            extra |= {"entropy_weight": entropy_coefficient * weight_BT} if entropy_coefficient else {}
            if importance_BT is not None:
                weight_BT = weight_BT * np.asarray(importance_BT)[rows]
            chosen: dict[str, Array] = {name: np.asarray(value, np.float32)[rows] for name, value in fields.items()}
            batches.append(Experience(part, weight_BT, {**chosen, **extra}))
    return batches


def policy_minibatches(
    step: StepInput,
    sequences: Sequences,
    rollout: Rollout,
    *,
    advantage_BT: Array,
    old_logp_BT: Array | None,
    ref_logp_BT: Array | None,
    further: Mapping[str, Array] | None = None,
) -> tuple[list[Experience], Metrics]:
    """The actor's minibatches, KL and correction folded into weights, and what the correction did.

    Args:
      further: Fields that the algorithm's own objective reads.
    """
    settings = step.config.algorithm
    assert isinstance(settings, PolicyGradient)
    fields = {"advantage": advantage_BT, **(further or {})}
    if settings.old_logp == "bypass":
        fields["old_logp"] = rollout.sampler_logp_BT
    else:
        fields |= {"sampler_logp": rollout.sampler_logp_BT} if old_logp_BT is None else {"old_logp": old_logp_BT}
    in_loss = isinstance(settings.kl, KLInLoss)
    if in_loss:
        assert ref_logp_BT is not None, "a KL needs the reference"
        fields["ref_logp"] = ref_logp_BT
    importance_BT, metrics = None, {}
    if settings.correction is not None or settings.rejection:
        assert old_logp_BT is not None, "a correction needs the trainer's log-probabilities"
        importance_BT, corrected = rollout_correction(
            old_logp_BT,
            rollout.sampler_logp_BT,
            sequences.mask_BT,
            importance=settings.correction,
            rejection=settings.rejection,
        )
        metrics = {name: float(value) for name, value in corrected.items()}
    batches = minibatches(
        step,
        sequences,
        fields,
        aggregation=settings.policy.aggregation,
        importance_BT=importance_BT,
        kl_coefficient=step.state["kl_coefficient"] if in_loss else 0.0,
        entropy_coefficient=settings.policy.entropy_coefficient,
    )
    return batches, metrics


def next_state(step: StepInput, metrics: Metrics, *, sequences: int) -> State:
    """The KL coefficient of the next step."""
    kl = getattr(step.config.algorithm, "kl", None)
    state = dict(step.state)
    if kl is not None and kl.adaptive is not None:
        state["kl_coefficient"] = adaptive_kl_coefficient(
            state["kl_coefficient"],
            metrics["kl/ref_sequence_mean"],
            target=kl.adaptive.target,
            horizon=kl.adaptive.horizon,
            sequences=sequences,
        )
    return state


def scored(sequences: Sequences, scores: Scores) -> Sequences:
    """The sequences with unscorable rows taken out of the training mask."""
    mask_BT = np.asarray(sequences.mask_BT) & np.asarray(scores.scorable_B)[:, None]
    return replace(sequences, mask_BT=mask_BT)


def old_log_prob(roles: Roles, step: StepInput, rollout: Any) -> Any:
    """The actor's log-probabilities of a rollout; None where the sampler's serve."""
    settings = step.config.algorithm
    assert isinstance(settings, PolicyGradient)
    return None if settings.trusts_sampler(step.config) else roles.actor.compute_log_prob(rollout)


def ref_log_prob(roles: Roles, step: StepInput, rollout: Any) -> Any:
    """The reference's log-probabilities of a rollout; None where there is no KL to it, and so no reference."""
    return roles.reference.compute_ref_log_prob(rollout) if "reference" in step.config.algorithm.roles else None


def charged_rewards(
    step: StepInput,
    rollout: Rollout,
    scores: Scores,
    mask_BT: Array,
    *,
    old_logp_BT: Array | None,
    ref_logp_BT: Array | None,
) -> Array:
    """`reward_BT`: the score at each response's end, less the KL where that is in the reward.

    Args:
      mask_BT: Chosen tokens of scorable responses.
    """
    kl = getattr(step.config.algorithm, "kl", None)
    if not isinstance(kl, KLInReward):
        return token_rewards(scores.score_B, None, mask_BT, kl_coefficient=0.0)
    assert ref_logp_BT is not None, "a KL needs the reference"
    logp_BT = rollout.sampler_logp_BT if old_logp_BT is None else old_logp_BT
    kl_BT = kl_estimate(logp_BT, ref_logp_BT, estimator=kl.estimator)
    return token_rewards(scores.score_B, kl_BT, mask_BT, kl_coefficient=step.state["kl_coefficient"])


def rollout_metrics(rollout: Rollout, scores: Scores, old_logp_BT: Array | None, ref_logp_BT: Array | None) -> Metrics:
    """What one looks at first when a run goes wrong.

    Args:
      old_logp_BT: The trainer's; with None nothing is said of how far the sampler is from it.
      ref_logp_BT: The reference's; with None nothing is said of how far the policy is from it.
    """
    logp_BT = rollout.sampler_logp_BT if old_logp_BT is None else old_logp_BT
    mask_BT = np.asarray(rollout.sequences.mask_BT)
    length_B = mask_BT.sum(axis=1)
    score_B = np.asarray(scores.score_B)[scores.scorable_B]
    divergence = {} if ref_logp_BT is None else _divergence(logp_BT, ref_logp_BT, mask_BT)
    gaps = {} if old_logp_BT is None else _gaps(old_logp_BT, rollout)
    return {
        "score/mean": float(score_B.mean()) if len(score_B) else float("nan"),
        "score/std": float(score_B.std()) if len(score_B) else float("nan"),
        **{f"score/{name}": float(part[np.isfinite(part)].mean()) for name, part in _finite_parts(scores).items()},
        "reward/unscorable": float(np.sum(~np.asarray(scores.scorable_B))),
        "response/length_mean": float(length_B.mean()),
        "response/length_max": float(length_B.max()),
        "response/truncated_fraction": float(np.mean(rollout.truncated_B)),
        **divergence,
        "policy/entropy": float(masked_mean(-np.asarray(logp_BT), mask_BT)),
        "tokens/generated": float(mask_BT.sum()),
        **gaps,
    }


def _divergence(logp_BT: Array, ref_logp_BT: Array, mask_BT: np.ndarray) -> Metrics:
    k1_BT = np.where(mask_BT, kl_estimate(logp_BT, ref_logp_BT, estimator="k1"), 0.0)
    return {
        "kl/ref": float(masked_mean(kl_estimate(logp_BT, ref_logp_BT, estimator="k3"), mask_BT)),
        "kl/ref_sequence_mean": float(np.mean(k1_BT.sum(axis=1) / np.maximum(mask_BT.sum(axis=1), 1))),
    }


def _gaps(logp_BT: Array, rollout: Rollout) -> Metrics:
    gap = sampler_gap(logp_BT, rollout.sampler_logp_BT, np.asarray(rollout.sequences.mask_BT))
    return {
        "sampler/logp_gap_mean": float(gap.mean),
        "sampler/logp_gap_max": float(gap.max),
        "sampler/probability_error": float(gap.probability_error),
        "sampler/kl": float(gap.kl_sampler_trainer),
        "sampler/kl_reverse": float(gap.kl_trainer_sampler),
        "sampler/effective_fraction": float(gap.effective_fraction),
    }


def _finite_parts(scores: Scores) -> dict[str, np.ndarray]:
    return {name: np.asarray(part) for name, part in scores.parts.items() if np.isfinite(part).any()}


def call(function: Any, *args: Any) -> Any:
    """Run array maths of the controller on the results of futures."""
    return function(*map(value_of, args))


def value_of(value: Any) -> Any:
    """A future's result; anything else as it is."""
    return value.result() if isinstance(value, Future) else value
