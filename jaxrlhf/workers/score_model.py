"""Reward model: the score head of a classification checkpoint, applied to texts."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrlhf.algos import solution_score
from jaxrlhf.batch import Array, Params
from jaxrlhf.checkpoint import load_pretrained
from jaxrlhf.config import ModelReward, ProcessModelReward, Refusal
from jaxrlhf.data.tokenizer import load_tokenizer
from jaxrlhf.models import (
    choose_execution,
    hidden_states,
    label_bias,
    labels_steps,
    read_config,
    resolve,
    score,
    token_scores,
)
from jaxrlhf.models.huggingface.config import read_fields
from jaxrlhf.sharding.described import are_here, described
from jaxrlhf.sharding.mesh import BATCH_AXES, TOKEN_AXES, TRAINING_AXES
from jaxrlhf.workers.offloadable import Offloadable
from jaxrlhf.workers.role_weights import RoleWeights

_SMALLEST_WIDTH = 64


class ScoreModel:
    """Reward model that scores texts with its own tokenizer, which may differ from the policy's.

    A prompt is the policy's text, with the policy's chat template. A model of another family would read the template's
    marks as plain characters: call such a model in a `FunctionReward` that writes its own template. Sequences are
    batched by length, in widths that double, so that a run compiles a handful of programs.

    Args:
      path: Checkpoint directory or hub id: `...ForSequenceClassification` with one label, or to score steps
        `...ForTokenClassification` with two labels, the second for right steps. If the devices are only described, only
        the model's shape is read.
      mesh: A factored mesh; parameters have the training layout, and rows are split over the batch axes.
      dtype: Dtype of parameters and activations; the head computes in float32.
      offload: True to keep the parameters in host memory between calls.
      tokens_per_batch: Maximum number of tokens (padding included) of one forward pass, unless one row per device has
        more.

    Raises:
      Refusal: There is no such checkpoint, it has no score head, or it does not split over the mesh.
    """

    def __init__(
        self,
        path: str,
        *,
        mesh: Mesh,
        dtype: jnp.dtype,
        offload: bool = False,
        attention: Literal["auto", "xla"] = "auto",
        tokens_per_batch: int = 16_384,
    ) -> None:
        self._path, self._config, self._labels, self._bias = path, read_config(path), labels_steps(path), 0.0
        weights = RoleWeights("reward model", self._config, "score", dtype, None)
        if are_here(list(mesh.devices.flat)):
            self._tokenizer, self._padding = load_tokenizer(str(resolve(path))), read_fields(path).get("pad_token_id")
            params = load_pretrained(path, self._config, "score", weights.layout(mesh), dtype=dtype)
            self._bias = label_bias(path)
        else:
            params = weights.frozen_params(mesh)
        self.parameters = Offloadable(params, offload=offload)
        self._tokens_per_batch = tokens_per_batch
        self._rows_multiple, self._width_multiple = (
            int(np.prod([mesh.shape[axis] for axis in axes])) for axes in (BATCH_AXES, TOKEN_AXES)
        )
        self._row_sharding = NamedSharding(mesh, PartitionSpec(BATCH_AXES))
        self._execution = choose_execution(self._config, dtype, mesh, **TRAINING_AXES, wanted=attention)
        self._forward, self._forward_tokens = jax.jit(self._scores), jax.jit(self._token_scores)

    def reading(self, part: ModelReward) -> Callable[[Sequence[tuple[str, str, bool]]], np.ndarray]:
        """Return the scoring function for a part of the rewards: `score` for whole responses, or `score_steps`.

        Raises:
          Refusal: The part scores whole responses, and the model labels tokens.
        """
        if isinstance(part, ProcessModelReward):
            return partial(self.score_steps, part)
        if self._labels:
            raise Refusal(
                f"{self._path} labels single tokens, but ModelReward scores whole responses; use ProcessModelReward, "
                "or a checkpoint with one score"
            )
        return self.score

    def score(self, texts: Sequence[tuple[str, str, bool]]) -> np.ndarray:
        """Return the score of each (prompt, response, finished).

        The score is read at the EOS after a finished response, as such models are trained, and at the last token of a
        truncated response. Trailing tokens equal to the checkpoint's padding token are dropped first, as in
        transformers. A text that is empty or longer than the model's positions has the score NaN.
        """
        sequences = [self._encode(prompt + response, finished) for prompt, response, finished in texts]
        for tokens in sequences:
            while tokens and tokens[-1] == self._padding:
                tokens.pop()
        with self.parameters.on_devices():
            read = self._read(self._forward, sequences)
        return np.array([np.nan if own is None else own for own in read], np.float32)

    def score_steps(self, part: ProcessModelReward, texts: Sequence[tuple[str, str, bool]]) -> np.ndarray:
        """Return the score of each (prompt, response, finished), combined from the scores of the response's steps.

        Every step ends with the separator; the last step gets one if the response has none there. A response that has
        no step or is too long has the score NaN.

        Args:
          part: Part of the rewards, with the separator and the reduction over steps.
        """
        split = [self._in_steps(prompt, response, part.separator) for prompt, response, _ in texts]
        with self.parameters.on_devices():
            read = self._read(self._forward_tokens, [tokens for tokens, _ in split])
        return np.array(
            [
                np.nan if score_W is None or not last else solution_score(score_W[last], part.steps)
                for score_W, (_, last) in zip(read, split, strict=True)
            ],
            np.float32,
        )

    def _in_steps(self, prompt: str, response: str, separator: str) -> tuple[list[int], list[int]]:
        """Return the token ids, and the index of each step's last token.

        Steps and separators are tokenized separately, as in training.
        """
        tokens, last = self._encode(prompt, finished=False), list[int]()
        for step in response.split(separator):
            if step.strip():
                for text in (step, separator):
                    tokens += self._tokenizer.encode(text, add_special_tokens=False)
                last.append(len(tokens) - 1)
        return tokens, last

    def lower(self, tokens: int) -> jax.stages.Lowered:
        """Lower the program for texts of this number of tokens; works with described devices."""
        [(_, width, rows), *_] = self._batches(np.full(self._tokens_per_batch, tokens, np.int64))
        shapes = jax.ShapeDtypeStruct((rows, width), np.int32), jax.ShapeDtypeStruct((rows,), np.int32)
        return self._forward.lower(self.parameters.tree, *described(shapes, self._row_sharding))

    def _read(self, forward: Any, sequences: Sequence[Sequence[int]]) -> list[np.ndarray | None]:
        """Return the output of `forward` for each sequence, None if it is empty or too long.

        The parameters must be on the devices.
        """
        read: list[np.ndarray | None] = [None] * len(sequences)
        for chosen, width, rows in self._batches(np.array([len(tokens) for tokens in sequences], np.int64)):
            token_RW, length_R = np.zeros((rows, width), np.int32), np.zeros(rows, np.int32)
            for row, index in enumerate(chosen):
                length_R[row] = len(sequences[index])
                token_RW[row, : length_R[row]] = sequences[index]
            placed = jax.device_put((token_RW, length_R), self._row_sharding)
            for index, own in zip(chosen, np.asarray(forward(self.parameters.tree, *placed)), strict=False):
                read[index] = own
        return read

    def _encode(self, text: str, finished: bool) -> list[int]:
        bos, eos = self._tokenizer.bos_token, self._tokenizer.eos_token_id
        has_bos = bool(bos) and text.startswith(bos)  # the chat template wrote a BOS already
        tokens = self._tokenizer.encode(text, add_special_tokens=not has_bos)
        return [*tokens, eos] if finished and text and tokens[-1:] != [eos] else tokens

    def _batches(self, length_B: np.ndarray) -> Iterator[tuple[np.ndarray, int, int]]:
        """Yield batches of texts of similar length: their indices, padded width and padded number of rows."""
        longest = self._config.max_positions
        width_B = np.maximum(_SMALLEST_WIDTH, 2 ** np.ceil(np.log2(np.maximum(length_B, 1))).astype(np.int64))
        width_B = np.where((length_B > 0) & (length_B <= longest), np.minimum(width_B, longest), 0)
        width_B = -(-width_B // self._width_multiple) * self._width_multiple
        for width in np.unique(width_B[width_B > 0]):
            members = np.flatnonzero(width_B == width)
            fitting = self._tokens_per_batch // width // self._rows_multiple * self._rows_multiple
            rows = max(self._rows_multiple, int(fitting))
            for start in range(0, len(members), rows):
                yield members[start : start + rows], int(width), rows

    def _scores(self, params: Params, token_RW: Array, length_R: Array) -> Any:
        hidden_RWD = self._hidden(params, token_RW, length_R)
        return score(params, hidden_RWD, jnp.arange(len(token_RW)), jnp.maximum(length_R - 1, 0))

    def _token_scores(self, params: Params, token_RW: Array, length_R: Array) -> Any:
        return token_scores(params, self._hidden(params, token_RW, length_R)) + self._bias

    def _hidden(self, params: Params, token_RW: Array, length_R: Array) -> Any:
        rows, width = token_RW.shape
        position_RW = jnp.broadcast_to(jnp.arange(width), (rows, width))
        segment_RW = (position_RW < length_R[:, None]).astype(jnp.int32)
        execution = self._execution
        return hidden_states(params, self._config, token_RW, position_RW, segment_RW, execution=execution).hidden_RWD
