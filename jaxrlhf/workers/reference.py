"""The reference: the frozen policy that the actor is kept close to."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np

from jaxrlhf.algos.objectives import TokenOutput
from jaxrlhf.batch import Array, Params, Problem, RolloutBatch, Sequences
from jaxrlhf.batching.transfer_protocol import THREE_D_PROTO, worker_method
from jaxrlhf.config import Refusal
from jaxrlhf.data.retokenized import NO_SPAN, Aligned
from jaxrlhf.workers.actor import Actor
from jaxrlhf.workers.model import ModelWorker, sequences_of


class Reference(ModelWorker):
    """A policy that is not trained."""

    keeps_sampled = True

    @worker_method(THREE_D_PROTO)
    def compute_ref_log_prob(self, rollout: RolloutBatch | Sequences, *, temperature: float | None = None) -> Array:
        """log pi_ref of every response token. `temperature=None` is the rollout's."""
        return self.log_prob(rollout, temperature=temperature)


class SpanLogp(NamedTuple):
    """Log-probabilities of the spans of text that the policy's tokens are in.

    Attributes:
      logp_BT: float32 of the whole span, at each of its tokens; 0 where there is none.
      span_BT: int32, spans of each response from 0; `NO_SPAN` where there is none.
      name_BTK: int32, other tokens of the policy that are likely in the place of a span of one token, -1 for none; K is
        0 where none are asked for.
      named_BTK: Their float32 log-probabilities.
    """

    logp_BT: Array
    span_BT: Array
    name_BTK: Array
    named_BTK: Array


class Teacher(ModelWorker):
    """A policy that is not trained, with a tokenizer of its own."""

    @worker_method(THREE_D_PROTO)
    def compute_spans(self, problems: Sequence[Problem], rollout: RolloutBatch, *, named: int = 0) -> SpanLogp:
        """log pi of each span of the responses, at the rollout's temperature.

        Args:
          named: Likeliest tokens in the place of each span of one token, among those that the policy has too.

        Raises:
          Refusal: A prompt has more tokens here than there is room for.
        """
        mask_BT, longest = np.asarray(rollout.sequences.mask_BT), self.setup.longest_response
        more = *mask_BT.shape, named
        found = SpanLogp(
            np.zeros(mask_BT.shape, np.float32),
            np.full(mask_BT.shape, NO_SPAN, np.int32),
            np.full(more, -1, np.int32),
            np.zeros(more, np.float32),
        )
        read = partial(self.forward, temperature=self.setup.temperature, wanted="likeliest" if named else "output")
        if not self.here:
            read(_all_chosen(len(mask_BT), self.setup.width))
            return found
        prompts, responses = self._retokenized(problems, rollout)
        token_BT = np.zeros((len(mask_BT), self.setup.width), np.int32)
        chosen_BT, length_B = np.zeros(token_BT.shape, bool), np.zeros(len(mask_BT), np.int32)
        for row, (prompt, own) in enumerate(zip(prompts, responses, strict=True)):
            tokens = [*prompt, *own.tokens[:longest]]
            length_B[row], token_BT[row, : len(tokens)] = len(tokens), tokens
            chosen_BT[row, len(prompt) : len(tokens)] = True
        prompt_id_B = np.asarray(rollout.sequences.prompt_id_B)
        output: TokenOutput = read(Sequences(token_BT, length_B, chosen_BT, prompt_id_B))
        for row, own in enumerate(responses):
            span_S, sum_S = own.sums(np.asarray(output.logp)[row, chosen_BT[row]])
            found.span_BT[row, mask_BT[row]], found.logp_BT[row, mask_BT[row]] = span_S, sum_S
            if named:
                partner_S = np.where(span_S == NO_SPAN, NO_SPAN, own.partner_S())
                self._name(found, output, row, np.flatnonzero(mask_BT[row]), chosen_BT[row], partner_S)
        token_BT1 = np.asarray(rollout.sequences.token_BT)[..., None]
        found.name_BTK[found.name_BTK == token_BT1] = -1  # the span itself
        return found

    def _name(
        self, found: SpanLogp, output: TokenOutput, row: int, column_S: np.ndarray, chosen_T: Array, partner_S: Array
    ) -> None:
        """Fill in the likeliest tokens of a row, at the policy's tokens that have a partner."""
        assert self.setup.retokenizer is not None and output.names is not None
        own_id_V, most = self.setup.retokenizer.own_id_V(self.config.vocab_size), found.name_BTK.shape[-1]
        alone_S = partner_S != NO_SPAN
        place_S = np.flatnonzero(chosen_T)[partner_S[alone_S]]
        for read, filled in ((output.names, found.name_BTK), (output.named, found.named_BTK)):
            each_SK = np.asarray(read)[row, place_S, :most]
            filled[row, column_S[alone_S], : each_SK.shape[1]] = each_SK
        theirs = found.name_BTK[row]
        found.name_BTK[row] = np.where(theirs < 0, -1, own_id_V[theirs])

    def _retokenized(self, problems: Sequence[Problem], rollout: RolloutBatch) -> tuple[list[list[int]], list[Aligned]]:
        """Prompt and response of each row in the tokens of this model."""
        retokenizer, room = self.setup.retokenizer, self.setup.width - self.setup.longest_response
        assert retokenizer is not None, "the role's room says that the model has a tokenizer of its own"
        prompts = [retokenizer.prompt(problem) for problem in problems]
        if (longest := max(map(len, prompts))) > room:
            raise Refusal(
                f"a prompt has {longest} tokens of {self.role}_model, which has room for {room}; raise algorithm.room"
            )
        sequences, copies = rollout.sequences, len(rollout.truncated_B) // len(problems)
        rows = zip(np.asarray(sequences.token_BT), np.asarray(sequences.mask_BT), rollout.truncated_B, strict=True)
        responses = [retokenizer.response(token_T[mask_T].tolist(), finished=not cut) for token_T, mask_T, cut in rows]
        return [prompt for prompt in prompts for _ in range(copies)], responses


def _all_chosen(rows: int, width: int) -> Sequences:
    """Rows as long as they may be, for a program that is lowered."""
    tokens = np.ones((rows, width), np.int32), np.full(rows, width, np.int32), np.ones((rows, width), bool)
    return Sequences(*tokens, np.arange(rows, dtype=np.int64))


class FrozenActor:
    """A reference that is the actor's own frozen weights: it takes no memory for any.

    Args:
      adapters: Adapters that the actor started from; empty where it started from the weights alone.
    """

    def __init__(self, actor: Actor, adapters: Params) -> None:
        self.place = actor.place
        self._actor, self._adapters = actor, adapters

    @worker_method(THREE_D_PROTO)
    def compute_ref_log_prob(self, rollout: RolloutBatch | Sequences, *, temperature: float | None = None) -> Array:
        """log pi_ref of every response token. `temperature=None` is the rollout's."""
        # Other weights than those that sampled; their routers choose for themselves.
        sequences = replace(sequences_of(rollout), choice_BTLk=None)
        return self._actor.log_prob(sequences, temperature=temperature, adapters=self._adapters)
