"""Scoring: log-probabilities of given tokens, for evaluators and for alternatives to sampled tokens.

Sequences run whole in one forward pass, padded to the lengths of prefills, so that few programs are compiled.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from jaxrlhf import models
from jaxrlhf.batch import Array, Diverged, Params
from jaxrlhf.engine.checks import RequestLimits
from jaxrlhf.engine.compiled import Compiled, EngineShardings
from jaxrlhf.engine.prefill import PREFILL_TOKENS, Prefill
from jaxrlhf.engine.programs import Shape
from jaxrlhf.engine.weights import Weights
from jaxrlhf.models.heads import chunk_tokens, token_logp

MOST_LIKELY = 20
"""Number of likely tokens that are returned for one position, as many as OpenAI's API admits."""


class TokenScores(NamedTuple):
    """Log-probabilities of the tokens of one sequence, or of rows of sequences; 0 for the first token of a sequence.

    Attributes:
      logp_T: float32, log-probability of each token after the tokens before it.
      likely_TK: int32, ids of the likeliest tokens in each token's place, the likeliest first; -1 if there are fewer.
      likely_logp_TK: float32, log-probabilities of these tokens.
    """

    logp_T: Any
    likely_TK: Any
    likely_logp_TK: Any

    @property
    def is_greedy_T(self) -> np.ndarray:
        """Mask of the tokens that no other token exceeds in probability."""
        return self.logp_T >= self.likely_logp_TK[:, 0]

    def likely(self, place: int, count: int) -> list[tuple[int, float]]:
        """Return ids and log-probabilities of the likeliest tokens in a token's place."""
        ids, logps = self.likely_TK[place, :count].tolist(), self.likely_logp_TK[place, :count].tolist()
        return [(token, logp) for token, logp in zip(ids, logps, strict=True) if token >= 0]


def score(
    params: Params,
    layers: list[Params] | None,
    token_RW: Int[Array, "R W"],
    length_R: Int[Array, "R"],
    temperature: Float[Array, ""],
    *,
    shape: Shape,
) -> TokenScores:
    """Compute the log-probabilities of every token of left-aligned sequences.

    Args:
      layers: Unstacked layers from `unstack`; None reads the stacked layers of `params`.
    """
    position_RW = jnp.broadcast_to(jnp.arange(token_RW.shape[1], dtype=jnp.int32), token_RW.shape)
    there_RW = position_RW < length_R[:, None]
    how: dict[str, Any] = {"execution": shape.execution} | ({} if layers is None else {"layers": layers})
    rows = token_RW, position_RW, there_RW.astype(jnp.int32)
    hidden_RWD = models.hidden_states(params, shape.config, *rows, **how).hidden_RWD
    read = token_logp(
        params,
        shape.config,
        hidden_RWD,
        token_RW,
        there_RW,
        among_V=jnp.ones(shape.config.vocab_size, bool),
        temperature=temperature,
        chunk_tokens=chunk_tokens() * shape.replicas,
        execution=shape.execution,
    )
    assert read.named is not None and read.names is not None, "likely tokens were asked for"
    return TokenScores(read.logp, read.names[..., :MOST_LIKELY], read.named[..., :MOST_LIKELY])


class Scoring:
    """Scoring of any number of sequences with the engine's weights."""

    def __init__(self, compiled: Compiled, layout: EngineShardings, prefill: Prefill, limits: RequestLimits) -> None:
        self._compiled, self._layout, self._prefill, self._limits = compiled, layout, prefill, limits

    def batches(self, sequences: Sequence[Sequence[int]]) -> Iterator[list[int]]:
        """Yield the indices of sequences that run together: sequences of one padded length, the shortest first."""
        alike: dict[int, list[int]] = {}
        for index in sorted(range(len(sequences)), key=lambda index: len(sequences[index])):
            alike.setdefault(self._prefill.width(len(sequences[index])), []).append(index)
        for width, indices in alike.items():
            most = self._most(width)
            yield from (indices[start : start + most] for start in range(0, len(indices), most))

    def _most(self, width: int) -> int:
        replicas = self._compiled.shape.replicas
        return replicas * max(1, PREFILL_TOKENS // (width * replicas))

    def run(
        self, sequences: Sequence[Sequence[int]], weights: Weights, *, temperature: float = 1.0
    ) -> list[TokenScores]:
        """Score sequences and return their scores in order.

        A single sequence has a program with the fewest rows; batches of several are padded to the most rows.

        Raises:
          Refusal: A sequence is empty, too long, or not in the vocabulary.
          Diverged: The policy's logits are not finite.
        """
        for sequence in sequences:
            self._limits.check_scored(sequence)
        scores: dict[int, TokenScores] = {}
        for batch in self.batches(sequences):
            width = self._prefill.width(max(len(sequences[index]) for index in batch))
            rows = self._compiled.shape.replicas if len(sequences) == 1 else self._most(width)
            token_RW, length_R = np.zeros((rows, width), np.int32), np.ones(rows, np.int32)
            for row, index in enumerate(batch):
                length_R[row] = len(sequences[index])
                token_RW[row, : length_R[row]] = sequences[index]
            placed = self._compiled.put((token_RW, length_R), self._layout.rows)
            arguments = weights.params, weights.stackless, *placed, np.float32(temperature)
            read = jax.device_get(self._compiled.run(("score", rows, width), score, *arguments, out=self._layout.whole))
            for row, index in enumerate(batch):
                scores[index] = TokenScores(*(leaf[row, : length_R[row]] for leaf in read))
                if not np.isfinite(scores[index].logp_T).all():
                    raise Diverged("the policy's logits are not finite: its weights diverged or overflow")
        return [scores[index] for index in range(len(sequences))]
