"""Reference policy: the frozen policy that the actor is kept close to; and teachers for distillation."""

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
    """Frozen policy that scores the actor's tokens."""

    keeps_sampled = True

    @worker_method(THREE_D_PROTO)
    def compute_ref_log_prob(self, rollout: RolloutBatch | Sequences, *, temperature: float | None = None) -> Array:
        """Return log pi_ref of every response token. `temperature=None` takes the rollout's temperature."""
        return self.log_prob(rollout, temperature=temperature)


class SpanLogp(NamedTuple):
    """Teacher's log-probabilities of spans of text. A span begins and ends at token boundaries of both tokenizers.

    Attributes:
      logp_BT: float32, log-probability of the whole span, at each policy token of the span; 0 without a span.
      span_BT: int32, number of each token's span in its response, from 0; `NO_SPAN` without a span.
      name_BTK: int32, ids of likely alternative policy tokens at spans of one token, -1 for none; K is 0 if no
        alternatives were requested.
      named_BTK: float32, log-probabilities of the tokens in `name_BTK`.
    """

    logp_BT: Array
    span_BT: Array
    name_BTK: Array
    named_BTK: Array


class Teacher(ModelWorker):
    """Frozen policy with another tokenizer than the actor's; it scores spans of text."""

    @worker_method(THREE_D_PROTO)
    def compute_spans(self, problems: Sequence[Problem], rollout: RolloutBatch, *, named: int = 0) -> SpanLogp:
        """Return log pi of each span of the responses, at the rollout's temperature.

        Args:
          named: Number of likeliest alternative tokens at each span of one token; only tokens that the policy has too.

        Raises:
          Refusal: A prompt has more tokens of this model than there is room for.
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
        if not self.has_devices:
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
        """Fill in the likeliest tokens of a row, at the policy tokens that are a span with one token of this model.

        Args:
          column_S: Columns of the row's response tokens.
          chosen_T: Mask of the response in this model's tokens.
          partner_S: Index of the one token of this model in each policy token's span; `NO_SPAN` if there is none.
        """
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
        """Re-tokenize the prompt and the response of each row with this model's tokenizer."""
        retokenizer, room = self.setup.retokenizer, self.setup.width - self.setup.longest_response
        assert retokenizer is not None, "a teacher needs a retokenizer"
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
    """Return rows of the full width, all tokens chosen, to lower a program with."""
    tokens = np.ones((rows, width), np.int32), np.full(rows, width, np.int32), np.ones((rows, width), bool)
    return Sequences(*tokens, np.arange(rows, dtype=np.int64))


class SharedWeightsReference:
    """Reference policy that reads the actor's own frozen weights, so it needs no memory for weights.

    Args:
      adapters: Adapters that the actor started from; empty if the actor started from the weights alone.
    """

    def __init__(self, actor: Actor, adapters: Params) -> None:
        self.place = actor.place
        self._actor, self._adapters = actor, adapters

    @worker_method(THREE_D_PROTO)
    def compute_ref_log_prob(self, rollout: RolloutBatch | Sequences, *, temperature: float | None = None) -> Array:
        """Return log pi_ref of every response token. `temperature=None` takes the rollout's temperature."""
        # No router replay: these weights did not sample the tokens, so their routers choose the experts.
        sequences = replace(sequences_of(rollout), choice_BTLk=None)
        return self._actor.log_prob(sequences, temperature=temperature, adapters=self._adapters)
