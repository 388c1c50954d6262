"""On-policy distillation from a teacher with another tokenizer, on GSM8K.

    python -m jaxrlhf.train --config span_distillation.py

Qwen2.5-0.5B-Instruct answers, and SmolLM2-1.7B-Instruct judges each span of text. All other settings are those of
`grpo_gsm8k.py`. No result yet: the run needs an accelerator.

Source: spans as in Minixhofer et al. 2025 (arXiv:2503.20083), approximate likelihood matching.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int
from transformers import PreTrainedTokenizerBase

from jaxrlhf.algos import TokenOutput, policy_objective
from jaxrlhf.batch import Array, Params, Problem, RolloutBatch, Scores, Sequences
from jaxrlhf.batching.transfer_protocol import THREE_D_PROTO, worker_method
from jaxrlhf.config import Config, Distillation, Pretrained, Refusal, RoleSpec, Training, load
from jaxrlhf.config.refusal import require
from jaxrlhf.config.roles import REWARD, actor
from jaxrlhf.config.settings import Positive
from jaxrlhf.data.tokenizer import decoder, pieces_of, render_chat
from jaxrlhf.dataflows.batches.estimate import next_state, old_log_prob
from jaxrlhf.dataflows.batches.minibatches import Minibatches, policy_minibatches
from jaxrlhf.dataflows.batches.rollout_metrics import rollout_metrics
from jaxrlhf.dataflows.batches.scored import ScoredRollout
from jaxrlhf.dataflows.step import Metrics, Roles, StepInput, StepResult, call, value_of
from jaxrlhf.workers.model import ModelSetup, ModelWorker

NO_SPAN = -1
NO_CHARACTER = "\ufffd"


class Aligned(NamedTuple):
    """Response in the tokens of another tokenizer, aligned with the policy's tokens.

    A span is a shortest stretch of text that begins and ends at a token boundary of both tokenizers.

    Attributes:
      tokens: Token ids of the other tokenizer, with its EOS if the response ended with EOS.
      span_S: Span of each of the policy's tokens, counted from 0; `NO_SPAN` after the last common boundary, and from
        the first bytes that are no character.
      span_T: Span of each of the other tokenizer's tokens.
    """

    tokens: list[int]
    span_S: np.ndarray
    span_T: np.ndarray

    def sums(self, logp_T: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the span of each of the policy's tokens, and the sum of the other model's log-probabilities over it.

        Args:
          logp_T: Log-probabilities of the first tokens of `tokens`; a span that extends beyond them becomes `NO_SPAN`.
        """
        count = len(logp_T)
        whole = self.span_T[count] if count < len(self.span_T) else NO_SPAN
        spans = int(self.span_T.max(initial=NO_SPAN)) + 1 if whole == NO_SPAN else int(whole)
        inside_T = (self.span_T[:count] >= 0) & (self.span_T[:count] < spans)
        sums = np.bincount(self.span_T[:count][inside_T], weights=logp_T[inside_T], minlength=spans + 1)
        span_S = np.where(self.span_S < spans, self.span_S, NO_SPAN)
        return span_S, np.where(span_S == NO_SPAN, 0.0, sums[span_S])


class Retokenizer:
    """Conversion of a policy's prompts and responses to the tokens of another model.

    Args:
      other: Tokenizer of the other model; its chat template renders the prompts.

    Raises:
      Refusal: The other tokenizer does not report the offsets of tokens in a text.
    """

    def __init__(self, policy: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase) -> None:
        if not other.is_fast:
            raise Refusal(
                f"{type(other).__name__} does not report the offsets of tokens; use a model with a tokenizer.json"
            )
        self._decode, self._special, self._other = decoder(policy), frozenset(policy.all_special_ids), other

    def prompt(self, problem: Problem) -> list[int]:
        """Return the token ids of a prompt: its messages in the other chat template; without either, its text."""
        if self._other.chat_template is None or not problem.messages:
            return self._ids(problem.prompt, special=True)[0]
        messages = [dict(message) for message in problem.messages]
        return self._ids(str(render_chat(self._other, messages, add_generation_prompt=True)), special=False)[0]

    def response(self, tokens: Sequence[int], *, finished: bool) -> Aligned:
        """Return the response in the other model's tokens, aligned with the policy's.

        Args:
          finished: False if a limit truncated the response, so that it has no EOS.
        """
        ends = finished and bool(tokens) and tokens[-1] in self._special
        text_tokens = list(tokens[:-1] if ends else tokens)
        pieces = pieces_of(text_tokens, self._decode)
        # Another model cannot score bytes of half a character, so the response is truncated before them.
        pieces = pieces[: next((index for index, piece in enumerate(pieces) if NO_CHARACTER in piece), len(pieces))]
        ends = ends and len(pieces) == len(text_tokens)
        ids, end_T = self._ids("".join(pieces), special=False)
        # A policy token without text belongs to the token that completes its character. The other tokenizer reports
        # the end of the character as the end of each of the character's tokens.
        place_S = np.cumsum([len(piece) for piece in pieces], dtype=int)
        cuts_S = {int(place): index for index, place in reversed([*enumerate(place_S)]) if pieces[index]}
        cuts_T = {int(place): index for index, place in enumerate(end_T)}
        shared = sorted(cuts_S.keys() & cuts_T.keys())
        span_S = _spans([cuts_S[place] for place in shared], len(tokens))
        span_T = _spans([cuts_T[place] for place in shared], len(ids))
        if ends:  # the EOS tokens of both form a span of their own
            ids, span_S[-1], span_T = [*ids, self._other.eos_token_id], len(shared), np.append(span_T, len(shared))
        return Aligned(ids, span_S, span_T)

    def _ids(self, text: str, *, special: bool) -> tuple[list[int], list[int]]:
        """Return the token ids of a text, and the offset in the text at which each token ends."""
        encoded = self._other(text, add_special_tokens=special, return_offsets_mapping=True)
        return list(encoded["input_ids"]), [end for _, end in encoded["offset_mapping"]]


def _spans(last: Sequence[int], count: int) -> np.ndarray:
    """Return the span of each of `count` tokens, from the index of the last token of each span."""
    span = np.searchsorted(np.asarray(last, int), np.arange(count))
    return np.where(span < len(last), span, NO_SPAN)


class SpanLogp(NamedTuple):
    """Teacher's log-probabilities of spans of text. A span begins and ends at token boundaries of both tokenizers.

    Attributes:
      logp_BT: float32, log-probability of the whole span, at each policy token of the span; 0 without a span.
      span_BT: int32, number of each token's span in its response, from 0; `NO_SPAN` without a span.
    """

    logp_BT: Array
    span_BT: Array


class TeacherOutput(NamedTuple):
    """Result of a teacher's pass over responses in its own tokens.

    Attributes:
      output: Output of the head, in the teacher's tokens.
      chosen_BT: bool, tokens of the responses, in the teacher's tokens.
      responses: Response of each row, aligned with the policy's tokens.
    """

    spans: SpanLogp
    output: TokenOutput
    chosen_BT: np.ndarray
    responses: list[Aligned]


class Teacher(ModelWorker):
    """Frozen policy with another tokenizer than the actor's; it scores spans of text."""

    def __init__(self, setup: ModelSetup, params: Params) -> None:
        super().__init__(setup, params)
        self.retokenizer = None if setup.tokenizers is None else Retokenizer(*setup.tokenizers)

    @worker_method(THREE_D_PROTO)
    def compute_spans(self, problems: Sequence[Problem], rollout: RolloutBatch) -> SpanLogp:
        """Return log pi of each span of the responses, at the rollout's temperature.

        Raises:
          Refusal: A prompt has more tokens of this model than there is room for.
        """
        if not self.has_devices:
            return self.lowered_spans(rollout)
        return self.read(problems, rollout).spans

    def lowered_spans(self, rollout: RolloutBatch, **how: Any) -> SpanLogp:
        """Lower the forward program, and return empty spans."""
        rows, width = len(rollout.truncated_B), self.setup.width
        tokens = np.ones((rows, width), np.int32), np.full(rows, width, np.int32), np.ones((rows, width), bool)
        self.forward(Sequences(*tokens, np.arange(rows, dtype=np.int64)), temperature=self.setup.temperature, **how)
        return empty_spans(rollout)

    def read(self, problems: Sequence[Problem], rollout: RolloutBatch, **how: Any) -> TeacherOutput:
        """Tokenize prompts and responses again, and score each span."""
        mask_BT, longest = np.asarray(rollout.sequences.mask_BT), self.setup.longest_response
        spans = empty_spans(rollout)
        prompts, responses = self._retokenized(problems, rollout)
        answers = [own.tokens[:longest] for own in responses]
        tokens = [(*prompt, *answer) for prompt, answer in zip(prompts, answers, strict=True)]
        masks = [[False] * len(prompt) + [True] * len(answer) for prompt, answer in zip(prompts, answers, strict=True)]
        ids = np.asarray(rollout.sequences.prompt_id_B).tolist()
        sequences = Sequences.of(tokens, masks, ids, width=self.setup.width)
        chosen_BT = np.asarray(sequences.mask_BT)
        output: TokenOutput = self.forward(sequences, temperature=self.setup.temperature, **how)
        for row, own in enumerate(responses):
            span_S, sum_S = own.sums(np.asarray(output.logp)[row, chosen_BT[row]])
            spans.span_BT[row, mask_BT[row]], spans.logp_BT[row, mask_BT[row]] = span_S, sum_S
        return TeacherOutput(spans, output, chosen_BT, responses)

    def _retokenized(self, problems: Sequence[Problem], rollout: RolloutBatch) -> tuple[list[list[int]], list[Aligned]]:
        """Re-tokenize the prompt and the response of each row with this model's tokenizer."""
        retokenizer, room = self.retokenizer, self.setup.width - self.setup.longest_response
        assert retokenizer is not None, "a teacher needs both tokenizers"
        prompts = [retokenizer.prompt(problem) for problem in problems]
        if (longest := max(map(len, prompts))) > room:
            raise Refusal(
                f"a prompt has {longest} tokens of {self.role}_model, above the limit of {room}; raise "
                "algorithm.max_expansion"
            )
        sequences, copies = rollout.sequences, len(rollout.truncated_B) // len(problems)
        rows = zip(np.asarray(sequences.token_BT), np.asarray(sequences.mask_BT), rollout.truncated_B, strict=True)
        responses = [retokenizer.response(token_T[mask_T].tolist(), finished=not cut) for token_T, mask_T, cut in rows]
        return [prompt for prompt in prompts for _ in range(copies)], responses


def empty_spans(rollout: RolloutBatch) -> SpanLogp:
    """Return a result without spans, to be filled in."""
    shape = np.asarray(rollout.sequences.mask_BT).shape
    return SpanLogp(np.zeros(shape, np.float32), np.full(shape, NO_SPAN, np.int32))


def span_sums(
    value_BT: Float[np.ndarray, "B T"], span_BT: Int[np.ndarray, "B T"], mask_BT: Bool[np.ndarray, "B T"]
) -> Float[np.ndarray, "B T"]:
    """Sum over each token's span, that is over the tokens of the row with the same number; 0 outside the mask.

    Runs on the host.

    Args:
      span_BT: Span numbers, from 0 to T - 1 inside the mask.
    """
    rows, width = mask_BT.shape
    place_BT = np.where(mask_BT, span_BT, 0) + width * np.arange(rows)[:, None]
    inside_BT = np.where(mask_BT, value_BT, 0)
    total = np.bincount(place_BT.ravel(), weights=inside_BT.ravel(), minlength=rows * width)
    return np.where(mask_BT, total[place_BT], 0).astype(value_BT.dtype)


def learn(roles: Roles, work: StepInput["SpanDistillation"], batch: ScoredRollout) -> StepResult:
    """Update the student by spans of text, for a teacher with another tokenizer."""
    old_logp = old_log_prob(roles, work, batch.rollout)
    teacher: Any = roles.reference  # the algorithm's roles say that it is a `Teacher`
    spans = teacher.compute_spans(batch.problems, batch.rollout)
    prepared = call(partial(prepare, work), batch.rollout, batch.scores, old_logp, spans)
    actor = roles.actor.update_actor(prepared.policy, objective=policy_objective, settings=work.settings)
    return StepResult(prepared.metrics | batch.metrics, prepared.state, value_of(old_logp), updates=(actor,))


def prepare(
    work: StepInput["SpanDistillation"], rollout: RolloutBatch, scores: Scores, old_logp_BT: Array | None, spans: Any
) -> Minibatches:
    """Compute the advantage of each token's span and build the minibatches; tokens in no span are not trained on."""
    mask_BT, advantage_BT, metrics = compared(rollout, scores, old_logp_BT, spans)
    sequences = replace(rollout.sequences, mask_BT=mask_BT)
    policy, corrected = policy_minibatches(work, sequences, rollout, advantage_BT, old_logp_BT, None)
    return Minibatches(policy, [], metrics | corrected, next_state(work, metrics, sequences=len(mask_BT)))


def compared(
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


@dataclass(frozen=True)
class SpanDistillation(Distillation):
    """On-policy distillation from a teacher with another tokenizer.

    The text of a response is tokenized again for the teacher, in the teacher's chat template. Teacher and student are
    compared on spans: the shortest stretches of text at whose ends both tokenizations have a token boundary. Each token
    of the student gets the advantage of its span.

    Attributes:
      reference_model: Teacher model, with any tokenizer.
      max_expansion: Largest number of teacher tokens per student token, in prompts and in responses. Longer prompts are
        refused; spans of a response beyond the limit are not trained on.
    """

    learn = learn
    takes_several_sequences: ClassVar[bool] = False

    max_expansion: Positive[float] = 1.5
    removed: ClassVar[Mapping[str, str]] = MappingProxyType({"room": "set max_expansion instead"})

    def roles(self, training: Training) -> tuple[RoleSpec, ...]:
        judge = RoleSpec("reference", Teacher, model=self.reference_model, max_expansion=self.max_expansion)
        return (actor(training), judge, REWARD)

    def check(self, config: Config) -> None:
        require(
            config.environment is None,
            f"{type(self).__name__} tokenizes responses again, but environment has episodes of several turns; set "
            "environment=None, or choose Distillation with a teacher that has the student's tokenizer",
        )
        require(
            not getattr(config.model, "vision", False),
            f"{type(self).__name__} tokenizes texts for the teacher, but model.vision=True adds images; set "
            "model.vision=False",
        )


def get_config() -> Config:
    """Return the configuration of the run."""
    teacher = Pretrained("HuggingFaceTB/SmolLM2-1.7B-Instruct")
    algorithm = SpanDistillation(responses_per_update=64, reference_model=teacher)
    return replace(load("grpo_gsm8k"), name="span_distillation", algorithm=algorithm)
