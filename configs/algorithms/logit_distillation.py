"""On-policy distillation of distributions, from a teacher with any tokenizer, on GSM8K.

    python -m jaxrlhf.train --config logit_distillation.py

The models are those of `span_distillation.py`. No result yet: the run needs an accelerator.

Source: GOLD (Patiño et al. 2025, huggingface.co/spaces/HuggingFaceH4/on-policy-distillation), spans and merged
probabilities; Agarwal et al. 2024 (arXiv:2306.13649), the divergence; Minixhofer et al. 2025 (arXiv:2503.20083), the
text of a span against all other texts.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float
from transformers import PreTrainedTokenizerBase

from jaxrlhf import algos
from jaxrlhf.batch import Array, Params, Problem, RolloutBatch, Scores
from jaxrlhf.batching.transfer_protocol import THREE_D_PROTO, worker_method
from jaxrlhf.config import Config, PolicyLoss, Pretrained, RoleSpec, Training, load, load_module
from jaxrlhf.config.refusal import require
from jaxrlhf.config.settings import Share, within
from jaxrlhf.dataflows.batches.estimate import next_state, old_log_prob
from jaxrlhf.dataflows.batches.minibatches import Minibatches, policy_minibatches
from jaxrlhf.dataflows.batches.scored import ScoredRollout
from jaxrlhf.dataflows.step import Roles, StepInput, StepResult, call, value_of
from jaxrlhf.models.heads import MOST_LIKELY
from jaxrlhf.workers.model import ModelSetup

spans = load_module("span_distillation")
Teacher: Any = spans.Teacher
SpanDistillation: Any = spans.SpanDistillation
_NO_EVENT = -1e9  # finite, so that probability 0 times a difference of two such values is 0
_LEAST_REST = 1e-7  # rounding of float32


def event_divergence(
    logp_E: Float[Array, "*shape E"], teacher_logp_E: Float[Array, "*shape E"], *, beta: float
) -> Float[Array, "*shape"]:
    """Compute the generalized Jensen-Shannon divergence between two distributions over some events and their rest.

        D = beta KL(teacher || m) + (1 - beta) KL(policy || m),   m = beta teacher + (1 - beta) policy

    The sums are over the given events and one more event, that none of them happens. beta = 0 is
    KL(teacher || policy), beta = 1 is KL(policy || teacher).

    Args:
      logp_E: Log-probabilities of disjoint events. Padding is any finite number whose exponential underflows, in both
        arguments.

    Source: Agarwal et al. 2024 (arXiv:2306.13649), eq. 1, with its limits replaced by the two KLs, as in TRL.
    """
    own, other = _with_rest(logp_E), _with_rest(teacher_logp_E)
    if beta == 0.0:
        return _kl(other, own)
    if beta == 1.0:
        return _kl(own, other)
    mixed = jnp.logaddexp(other + math.log(beta), own + math.log1p(-beta))
    return beta * _kl(other, mixed) + (1 - beta) * _kl(own, mixed)


def _with_rest(logp_E: Array) -> Array:
    """Append the log-probability that no event happens; that probability is at least 1e-7."""
    rest = jnp.log(jnp.maximum(1 - jnp.exp(logp_E).sum(axis=-1, keepdims=True), _LEAST_REST))
    return jnp.concatenate([logp_E, rest], axis=-1)


def _kl(logp_E: Array, other_logp_E: Array) -> Array:
    return (jnp.exp(logp_E) * (logp_E - other_logp_E)).sum(axis=-1)


def span_objective(
    output: algos.TokenOutput, mask: Array, weight: Array, fields: Mapping[str, Any], settings: "LogitDistillation"
) -> algos.ObjectiveTerms:
    """Compute the divergence from a teacher's distribution over each span of text, at the span's last token.

        weight * event_divergence(policy, teacher)

    The first event is the text of the span; its log-probability is the sum over the span's tokens. The other events, at
    spans of one token, are alternative tokens.

    Args:
      output: In addition `named`, log-probabilities of the tokens in the field `named`.
      mask: Tokens in spans.
      fields: Fields of `policy_objective`, with an advantage of 0; `to_last`, number of tokens from each token to the
        last of its span; `teacher_logp` of the span; and at last tokens, `[R, W, K]`: `named`, ids of alternative
        tokens, below 0 for none, and `teacher_named`, the teacher's log-probabilities of these tokens.
    """
    policy = algos.policy_objective(output, mask, weight, fields, settings)
    assert output.named is not None, "the output lacks log-probabilities of the field `named`"
    to_last = algos.selected(fields["to_last"], mask).astype(jnp.int32)
    last = jnp.where(mask, jnp.arange(1, mask.shape[1] + 1)[None, :] + to_last, 0)
    own = algos.segment_sum(algos.selected(output.logp, mask), last)
    end = mask & (to_last == 0)
    there = end[..., None] & (fields["named"] >= 0)
    events, teacher = (
        jnp.concatenate([algos.selected(span, end)[..., None], jnp.where(there, named, _NO_EVENT)], axis=-1)
        for span, named in (
            (own, output.named),
            (algos.selected(fields["teacher_logp"], mask), fields["teacher_named"]),
        )
    )
    divergence = algos.selected(event_divergence(events, teacher, beta=settings.beta), end)
    loss = policy.loss + algos.selected(weight, mask) * divergence
    return algos.ObjectiveTerms(loss, {**policy.metrics, "spans/divergence": divergence})


def partners(own: Any) -> np.ndarray:
    """Return for each policy token the index in `own.tokens` of the token with the same text; `NO_SPAN` without one.

    Args:
      own: `Aligned` response.
    """
    partner_S = np.full(len(own.span_S), spans.NO_SPAN)
    count_S, count_T = (np.bincount(one[one >= 0], minlength=1) for one in (own.span_S, own.span_T))
    alone = [span for span, count in enumerate(count_S) if count == count_T[span] == 1]
    for span in alone:
        partner_S[own.span_S == span] = np.flatnonzero(own.span_T == span)
    return partner_S


def own_ids(policy: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase, vocab: int) -> np.ndarray:
    """Return for each id of the other model the policy's id of the same text, -1 without one; int32, `[vocab]`."""
    own, theirs = ids_by_text(policy), ids_by_text(other)
    own_id_V = np.full(vocab, -1, np.int32)
    for text in theirs.keys() & own.keys():
        own_id_V[theirs[text]] = own[text]
    return own_id_V


def ids_by_text(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    """Return token ids by their text in the middle of a text, without half characters; the empty text is EOS."""
    # Decode after another token, because a tokenizer may decode the first token of a text differently.
    [before] = tokenizer.encode("a", add_special_tokens=False)[-1:]
    start = len(tokenizer.decode([before]))
    texts = tokenizer.batch_decode([[before, token] for token in range(len(tokenizer))], skip_special_tokens=True)
    ids = {text[start:]: token for token, text in enumerate(texts) if spans.NO_CHARACTER not in text}
    return ids | {"": int(tokenizer.eos_token_id)}


class NamedSpans(NamedTuple):
    """Teacher's log-probabilities of spans of text, and of likely alternatives.

    Attributes:
      logp_BT, span_BT: Log-probability and number of the span of each policy token, as in `SpanLogp`.
      name_BTK: int32, ids of likely alternative policy tokens at spans of one token, -1 for none.
      named_BTK: float32, log-probabilities of the tokens in `name_BTK`.
    """

    logp_BT: Array
    span_BT: Array
    name_BTK: Array
    named_BTK: Array


class NamingTeacher(Teacher):
    """Teacher that also names the likeliest tokens in place of each span of one token."""

    def __init__(self, setup: ModelSetup, params: Params) -> None:
        super().__init__(setup, params)
        if setup.tokenizers is not None:
            self.own_id_V = own_ids(*setup.tokenizers, self.config.vocab_size)
            self.likeliest_among = self.own_id_V >= 0

    @worker_method(THREE_D_PROTO)
    def compute_named_spans(self, problems: Sequence[Problem], rollout: RolloutBatch, *, named: int) -> NamedSpans:
        """Return log pi of each span of the responses, and of other tokens, at the rollout's temperature.

        Args:
          named: Number of likeliest alternative tokens at each span of one token; only tokens that the policy has too.

        Raises:
          Refusal: A prompt has more tokens of this model than there is room for.
        """
        mask_BT, how = np.asarray(rollout.sequences.mask_BT), {"wanted": "likeliest"} if named else {}
        name_BTK = np.full((*mask_BT.shape, named), -1, np.int32)
        named_BTK = np.zeros(name_BTK.shape, np.float32)
        if not self.has_devices:
            empty = self.lowered_spans(rollout, **how)
            return NamedSpans(empty.logp_BT, empty.span_BT, name_BTK, named_BTK)
        read = self.read(problems, rollout, **how)
        for row, own in enumerate(read.responses if named else ()):
            whole_S = read.spans.span_BT[row, mask_BT[row]] != spans.NO_SPAN
            partner_S = np.where(whole_S, partners(own), spans.NO_SPAN)
            alone_S = partner_S != spans.NO_SPAN
            column_S, place_S = np.flatnonzero(mask_BT[row]), np.flatnonzero(read.chosen_BT[row])[partner_S[alone_S]]
            for source, target in ((read.output.names, name_BTK), (read.output.named, named_BTK)):
                each_SK = np.asarray(source)[row, place_S, :named]
                target[row, column_S[alone_S], : each_SK.shape[1]] = each_SK
        if named:
            name_BTK = np.where(name_BTK < 0, -1, self.own_id_V[name_BTK])
        name_BTK[name_BTK == np.asarray(rollout.sequences.token_BT)[..., None]] = -1  # the span itself
        return NamedSpans(read.spans.logp_BT, read.spans.span_BT, name_BTK, named_BTK)


def learn(roles: Roles, work: StepInput["LogitDistillation"], batch: ScoredRollout) -> StepResult:
    """Update the student by the teacher's distributions over spans of text."""
    old_logp = old_log_prob(roles, work, batch.rollout)
    teacher: Any = roles.reference  # the algorithm's roles say that it is a `NamingTeacher`
    judged = teacher.compute_named_spans(batch.problems, batch.rollout, named=work.settings.named)
    prepared = call(partial(prepare, work), batch.rollout, batch.scores, old_logp, judged)
    actor = roles.actor.update_actor(prepared.policy, objective=span_objective, settings=work.settings)
    return StepResult(prepared.metrics | batch.metrics, prepared.state, value_of(old_logp), updates=(actor,))


def prepare(
    work: StepInput["LogitDistillation"], rollout: RolloutBatch, scores: Scores, old_logp_BT: Array | None, judged: Any
) -> Minibatches:
    """Attach the teacher's distributions over spans and build the minibatches.

    `to_last` is the number of positions from a token to the last token of its span.
    """
    mask_BT, _, metrics = spans.compared(rollout, scores, old_logp_BT, judged)
    teacher_BT, span_BT, name_BTK, named_BTK = (np.asarray(array) for array in judged)
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


@dataclass(frozen=True)
class LogitDistillation(SpanDistillation):
    """On-policy distillation of distributions, from a teacher with another tokenizer or the student's.

    If a span is one token in both tokenizations, the two models are compared on the teacher's most likely tokens that
    the student also has, by their text; a longer span is compared on its text. All other tokens count as one more
    event. The loss is the divergence itself, so a step also learns about tokens that were not sampled.

    Attributes:
      named: Number of most likely tokens of the teacher that are compared; 0 compares only the sampled text.
      beta: Weight of the teacher in the mixture of the divergence: 0 is KL(teacher || student), which covers all modes
        of the teacher; 1 is KL(student || teacher), which concentrates on the most likely ones.
    """

    learn = learn

    named: Annotated[int, within(0, MOST_LIKELY)] = 32
    beta: Share[float] = 0.5

    def roles(self, training: Training) -> tuple[RoleSpec, ...]:
        policy, judge, *others = super().roles(training)
        return (policy, replace(judge, worker=NamingTeacher), *others)

    def check(self, config: Config) -> None:
        super().check(config)
        read = PolicyLoss(aggregation=self.policy.aggregation, entropy_coefficient=self.policy.entropy_coefficient)
        require(
            self.policy == read,
            f"LogitDistillation minimizes a divergence, so policy={self.policy} may only set aggregation and "
            "entropy_coefficient; use PolicyLoss with only these settings",
        )
        require(
            config.rollout.sampling.most_kept == 0,
            "LogitDistillation compares whole distributions, but rollout.sampling.top_k truncates the student's; "
            "sample with temperature only",
        )


def get_config() -> Config:
    """Return the configuration of the run."""
    teacher = Pretrained("HuggingFaceTB/SmolLM2-1.7B-Instruct")
    algorithm = LogitDistillation(responses_per_update=64, reference_model=teacher)
    return replace(load("span_distillation"), name="logit_distillation", algorithm=algorithm)
