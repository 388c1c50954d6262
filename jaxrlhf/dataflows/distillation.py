"""On-policy distillation: the student samples, and the advantage compares its log-probabilities with a teacher's.

    A_t = log pi_teacher(y_t | y_<t) - log pi_student(y_t | y_<t)

The mean advantage is minus the reverse KL, so following the advantage token by token lowers the reverse KL. If the
teacher has another tokenizer, y_t is a span of text: one or more tokens of the student and of the teacher.

Source: Agarwal et al. 2024 (arXiv:2306.13649), reverse KL on the student's own samples; as an
advantage: Thinking Machines Lab 2025, "On-policy distillation".
"""

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from jaxrlhf.algos import kl_estimate, policy_objective, selected, span_objective, span_sums
from jaxrlhf.batch import Array, RolloutBatch, Scores
from jaxrlhf.config import LogitDistillation, PolicyGradient, SpanDistillation
from jaxrlhf.dataflows.batches.estimate import next_state, old_log_prob
from jaxrlhf.dataflows.batches.minibatches import Minibatches, mask_untrained, policy_minibatches
from jaxrlhf.dataflows.batches.rollout_metrics import rollout_metrics
from jaxrlhf.dataflows.batches.scored import ScoredRollout
from jaxrlhf.dataflows.step import Metrics, Roles, StepInput, StepResult, call, value_of


def learn(roles: Roles, work: StepInput[PolicyGradient], batch: ScoredRollout) -> StepResult:
    """Update the student; the advantage is the teacher's log-probability minus the student's, token by token."""
    old_logp = old_log_prob(roles, work, batch.rollout)
    teacher_logp = roles.reference.compute_ref_log_prob(batch.rollout)
    estimate = partial(prepare, work, trained_B=batch.trained_B)
    prepared = call(estimate, batch.rollout, batch.scores, old_logp, teacher_logp)
    actor = roles.actor.update_actor(prepared.policy, objective=policy_objective, settings=work.settings)
    return StepResult(prepared.metrics | batch.metrics, prepared.state, value_of(old_logp), updates=(actor,))


def prepare(
    work: StepInput[PolicyGradient],
    rollout: RolloutBatch,
    scores: Scores,
    old_logp_BT: Array | None,
    teacher_logp_BT: Array,
    trained_B: Array | None = None,
) -> Minibatches:
    """Compute the advantage of each token and build the minibatches; responses without a score are trained on too."""
    sequences, mask_BT = rollout.sequences, rollout.sequences.mask_BT
    logp_BT = rollout.sampler_logp_BT if old_logp_BT is None else old_logp_BT
    advantage_BT = -np.asarray(selected(kl_estimate(logp_BT, teacher_logp_BT, estimator="k1"), mask_BT))
    sequences = mask_untrained(sequences, trained_B)
    policy, corrected = policy_minibatches(work, sequences, rollout, advantage_BT, old_logp_BT, teacher_logp_BT)
    metrics = rollout_metrics(rollout, scores, old_logp_BT, teacher_logp_BT)
    return Minibatches(policy, [], metrics | corrected, next_state(work, metrics, sequences=len(mask_BT)))


def learn_spans(roles: Roles, work: StepInput[SpanDistillation], batch: ScoredRollout) -> StepResult:
    """Update the student by spans of text, for a teacher with another tokenizer."""
    old_logp = old_log_prob(roles, work, batch.rollout)
    teacher: Any = roles.reference  # the algorithm's roles say that it is a `Teacher`
    spans = teacher.compute_spans(batch.problems, batch.rollout)
    prepared = call(partial(prepare_spans, work), batch.rollout, batch.scores, old_logp, spans)
    actor = roles.actor.update_actor(prepared.policy, objective=policy_objective, settings=work.settings)
    return StepResult(prepared.metrics | batch.metrics, prepared.state, value_of(old_logp), updates=(actor,))


def prepare_spans(
    work: StepInput[SpanDistillation], rollout: RolloutBatch, scores: Scores, old_logp_BT: Array | None, spans: Any
) -> Minibatches:
    """Compute the advantage of each token's span and build the minibatches; tokens in no span are not trained on."""
    mask_BT, advantage_BT, metrics = _compared(rollout, scores, old_logp_BT, spans)
    sequences = replace(rollout.sequences, mask_BT=mask_BT)
    policy, corrected = policy_minibatches(work, sequences, rollout, advantage_BT, old_logp_BT, None)
    return Minibatches(policy, [], metrics | corrected, next_state(work, metrics, sequences=len(mask_BT)))


def learn_distributions(roles: Roles, work: StepInput[LogitDistillation], batch: ScoredRollout) -> StepResult:
    """Update the student by the teacher's distributions over spans of text."""
    old_logp = old_log_prob(roles, work, batch.rollout)
    teacher: Any = roles.reference
    spans = teacher.compute_spans(batch.problems, batch.rollout, named=work.settings.named)
    prepared = call(partial(prepare_distributions, work), batch.rollout, batch.scores, old_logp, spans)
    actor = roles.actor.update_actor(prepared.policy, objective=span_objective, settings=work.settings)
    return StepResult(prepared.metrics | batch.metrics, prepared.state, value_of(old_logp), updates=(actor,))


def prepare_distributions(
    work: StepInput[LogitDistillation], rollout: RolloutBatch, scores: Scores, old_logp_BT: Array | None, spans: Any
) -> Minibatches:
    """Attach the teacher's distributions over spans and build the minibatches.

    `to_last` is the number of positions from a token to the last token of its span.
    """
    mask_BT, _, metrics = _compared(rollout, scores, old_logp_BT, spans)
    teacher_BT, span_BT, name_BTK, named_BTK = (np.asarray(array) for array in spans)
    rows, width = mask_BT.shape
    column_BT = np.broadcast_to(np.arange(width), mask_BT.shape)
    last_N = np.zeros(rows * width, int)
    place_BT = np.where(mask_BT, span_BT, 0) + width * np.arange(rows)[:, None]
    np.maximum.at(last_N, place_BT[mask_BT], column_BT[mask_BT])
    to_last_BT = np.where(mask_BT, last_N[place_BT] - column_BT, 0)
    fields = {"to_last": to_last_BT, "teacher_logp": teacher_BT, "named": name_BTK, "teacher_named": named_BTK}
    end_BT = mask_BT & (to_last_BT == 0)
    chance_BT = np.exp(teacher_BT) + np.where(name_BTK < 0, 0, np.exp(named_BTK)).sum(axis=-1)
    metrics["spans/named_probability"] = float(chance_BT[end_BT].mean()) if end_BT.any() else 0.0
    sequences, zeros_BT = replace(rollout.sequences, mask_BT=mask_BT), np.zeros_like(teacher_BT)
    policy, corrected = policy_minibatches(work, sequences, rollout, zeros_BT, old_logp_BT, None, fields)
    return Minibatches(policy, [], metrics | corrected, next_state(work, metrics, sequences=rows))


def _compared(
    rollout: RolloutBatch, scores: Scores, old_logp_BT: Array | None, spans: Any
) -> tuple[np.ndarray, np.ndarray, Metrics]:
    """Return `mask_BT` of tokens in spans, their span's log-ratio of teacher to student `[B, T]`, and metrics."""
    teacher_BT, span_BT = (np.asarray(array) for array in spans[:2])
    logp_BT = np.asarray(rollout.sampler_logp_BT if old_logp_BT is None else old_logp_BT)
    chosen_BT = np.asarray(rollout.sequences.mask_BT)
    mask_BT = chosen_BT & (span_BT >= 0)
    own_BT, count_BT = span_sums(logp_BT, span_BT, mask_BT), span_sums(np.ones_like(logp_BT), span_BT, mask_BT)
    advantage_BT = np.where(mask_BT, teacher_BT - own_BT, 0).astype(np.float32)
    # For the metrics, the log-ratio of a span is spread evenly over its tokens.
    spread_BT = np.where(chosen_BT, logp_BT + advantage_BT / np.maximum(count_BT, 1), 0)
    metrics = rollout_metrics(rollout, scores, old_logp_BT, spread_BT)
    metrics["spans/aligned_fraction"] = float(mask_BT.sum() / max(chosen_BT.sum(), 1))
    metrics["spans/tokens_mean"] = float(mask_BT.sum() / max((1 / np.maximum(count_BT, 1))[mask_BT].sum(), 1))
    return mask_BT, advantage_BT, metrics
