"""Batches without padding, as updates read them: columns of tokens, rows of minibatches, weights."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from flax import struct

from jaxrlhf.batch import Array, Sequences


def without_padding(array_BT: Array, length_B: Array) -> np.ndarray:
    """Return the tokens of `[B, T, ...]` rows one after another, `[tokens, ...]`.

    Args:
      length_B: Number of tokens of each row, `[B]`, or of each sequence of a row, as in `Sequences.length_B`.
    """
    array, length = np.asarray(array_BT), np.asarray(length_B)
    width = array.shape[1] // math.prod(length.shape[1:])
    inside = np.arange(width) < length[..., None]
    return array.reshape(*inside.shape, *array.shape[2:])[inside]


@struct.dataclass
class RaggedBatch:
    """Sequences without padding: the tokens of row b are entries `offset_B[b]` to `offset_B[b + 1]` of every column.

    Attributes:
      offset_B: int64, start of each row and the end of the last.
      columns: `[tokens, ...]` arrays by name: `token`, `mask` and further ones, alone or in dicts such as `recorded`.
      prompt_id_B: int64 group key.
      images_B: object array with a tuple of `Image`s per row; None without images.
      width: T, number of columns of the padded arrays.
    """

    offset_B: np.ndarray
    columns: dict[str, Any]
    prompt_id_B: np.ndarray
    images_B: np.ndarray | None
    width: int = struct.field(pytree_node=False)

    @classmethod
    def of(cls, sequences: Sequences, **columns: Any) -> "RaggedBatch":
        """Return sequences without their padding; sequences side by side become one row each.

        Args:
          columns: Further `[B, T, ...]` arrays, or dicts of them.
        """
        length = np.asarray(sequences.length_B)
        there_BK = _has_sequence(length)
        arrays = {"token": sequences.token_BT, "mask": sequences.mask_BT, "recorded": dict(sequences.recorded)}
        return cls(
            _offsets(length.reshape(there_BK.shape)[there_BK]),
            jax.tree.map(lambda array: without_padding(array, length), arrays | columns),
            np.repeat(np.asarray(sequences.prompt_id_B), there_BK.sum(axis=1)),
            sequences.images_B,
            width=np.shape(sequences.token_BT)[1] // there_BK.shape[1],
        )

    @property
    def length_B(self) -> np.ndarray:
        """int32, number of tokens of each row."""
        return np.diff(self.offset_B).astype(np.int32)

    @property
    def position(self) -> tuple[np.ndarray, np.ndarray]:
        """Row and position in the row of every token."""
        row = np.repeat(np.arange(len(self.length_B)), self.length_B)
        return row, np.arange(len(row)) - self.offset_B[row]

    def take(self, rows: np.ndarray) -> "RaggedBatch":
        """Return the batch of these rows."""
        offset_B = _offsets(self.length_B[rows])
        index = np.arange(offset_B[-1]) + np.repeat(self.offset_B[:-1][rows] - offset_B[:-1], np.diff(offset_B))
        columns = jax.tree.map(lambda column: column[index], self.columns)
        images_B = None if self.images_B is None else self.images_B[rows]
        return RaggedBatch(offset_B, columns, self.prompt_id_B[rows], images_B, self.width)

    def padded(self, column: np.ndarray, padding: int = 0) -> np.ndarray:
        """Return the `[B, T, ...]` array of a column."""
        array = np.full((len(self.length_B), self.width, *column.shape[1:]), padding, column.dtype)
        array[np.arange(self.width) < self.length_B[:, None]] = column
        return array

    @property
    def sequences(self) -> Sequences:
        """The sequences, padded."""
        token_BT, mask_BT = (self.padded(self.columns[name]) for name in ("token", "mask"))
        recorded = {name: self.padded(column, -1) for name, column in self.columns["recorded"].items()}
        return Sequences(token_BT, self.length_B, mask_BT, self.prompt_id_B, self.images_B, recorded)


def _offsets(length_B: np.ndarray) -> np.ndarray:
    """Return the start of each row and the end of the last."""
    return np.concatenate([[0], np.cumsum(length_B, dtype=np.int64)])


def _has_sequence(length: np.ndarray) -> np.ndarray:
    """Return bool `[B, k]`, True for the sequences that rows of up to k sequences side by side have; at least one."""
    there_BK = length.reshape(len(length), -1) > 0
    there_BK[:, 0] = True
    return there_BK


@struct.dataclass
class Experience:
    """Input of an update: one sum, `sum(weight * token_loss)`, with fixed weights.

    Weights include masks, filters, importance weights and denominators of the whole update: the trainer never divides.

    Attributes:
      batch: Tokens; the column `mask` marks trained tokens, `weight` is the float32 weight of each token's main loss, 0
        where untrained, and `fields` holds further columns that the loss reads by name, such as `advantage`,
        `old_logp` and `returns`.
      prompts: Number of distinct prompts that rows are sized for; None counts the prompts of the sequences.
      together: Number of consecutive sequences that one microbatch has to hold, 2 for preference pairs.
    """

    batch: RaggedBatch
    prompts: int | None = struct.field(pytree_node=False, default=None)
    together: int = struct.field(pytree_node=False, default=1)

    @classmethod
    def of(
        cls,
        sequences: Sequences,
        weight_BT: Array,
        fields: Mapping[str, Array],
        *,
        prompts: int | None = None,
        together: int = 1,
    ) -> "Experience":
        """Return the update on `[B, T]` arrays."""
        return cls(RaggedBatch.of(sequences, weight=weight_BT, fields=dict(fields)), prompts, together)

    @property
    def sequences(self) -> Sequences:
        """The sequences, padded."""
        return self.batch.sequences

    @property
    def weight_BT(self) -> np.ndarray:
        """Weight of each token, padded with 0."""
        return self.batch.padded(self.batch.columns["weight"])

    @property
    def fields(self) -> dict[str, np.ndarray]:
        """`[B, T]` arrays that the loss reads by name, padded with 0."""
        return {name: self.batch.padded(column) for name, column in self.batch.columns["fields"].items()}

    def with_fields(self, fields: Mapping[str, np.ndarray]) -> "Experience":
        """Return the update with further or changed `[tokens]` columns among its fields."""
        columns = self.batch.columns
        return replace(self, batch=replace(self.batch, columns={**columns, "fields": {**columns["fields"], **fields}}))

    @property
    def units(self) -> int:
        """Number of sequences or pairs that may be on different ranks."""
        return len(self.batch.prompt_id_B) // self.together

    def part(self, index: int, parts: int) -> "Experience":
        """Return an equal share of the rows; sequences that a microbatch has to hold stay together."""
        start, stop = (end * self.units // parts * self.together for end in (index, index + 1))
        return replace(self, batch=self.batch.take(np.arange(start, stop)))


@dataclass(frozen=True, eq=False)
class MinibatchRows(Sequence[Experience]):
    """Minibatches as rows of one batch. Each minibatch is built on access, so the batch is stored and sent once.

    Attributes:
      batch: Tokens, masks and loss inputs of the whole batch, and `importance`, the factors of the main loss's weights.
      rows: Row indices of each minibatch.
      weights: Token weights of each minibatch, concatenated over rows without padding, before importance weights.
      coefficients: Names of further fields with a factor each; the field is the factor times the weights.
      prompts: Number of distinct prompts of the whole batch, also kept by its parts.
    """

    batch: RaggedBatch
    rows: tuple[np.ndarray, ...]
    weights: tuple[np.ndarray, ...]
    coefficients: Mapping[str, float]
    prompts: int

    @classmethod
    def of(
        cls,
        sequences: Sequences,
        fields: Mapping[str, Array],
        chosen: Sequence[np.ndarray],
        weights: Sequence[Array],
        *,
        importance_BT: Array | None = None,
        coefficients: Mapping[str, float],
    ) -> "MinibatchRows":
        """Return the minibatches of a batch of sequences.

        Args:
          fields: `[B, T]` arrays that the loss reads by name; padding is dropped.
          chosen: Indices of the responses or episodes of each minibatch.
          weights: `[b, T]` weights of each minibatch.
          importance_BT: Factors of the main loss's weights; None is 1.
        """
        length = np.asarray(sequences.length_B)
        further = {} if importance_BT is None else {"importance": importance_BT}
        numbers = {name: np.asarray(value, np.float32) for name, value in fields.items()}
        batch = RaggedBatch.of(sequences, fields=numbers, **further)
        ends_B = np.cumsum(_has_sequence(length).sum(axis=1))
        rows_B = np.split(np.arange(ends_B[-1]), ends_B[:-1])
        rows = tuple(np.concatenate([rows_B[b] for b in own]) for own in chosen)
        given = tuple(without_padding(weight, length[own]) for own, weight in zip(chosen, weights, strict=True))
        return cls(batch, rows, given, coefficients, len(np.unique(batch.prompt_id_B)))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        batch, weight = self.batch.take(self.rows[index]), self.weights[index]
        columns = dict(batch.columns)
        scaled = {name: number * weight for name, number in self.coefficients.items()}
        columns |= {"fields": columns["fields"] | scaled, "weight": weight * columns.pop("importance", np.float32(1))}
        return Experience(replace(batch, columns=columns), self.prompts)

    @property
    def units(self) -> int:
        """Number of rows of the smallest minibatch."""
        return min(map(len, self.rows))

    def part(self, index: int, parts: int) -> "MinibatchRows":
        """Return an equal share of every minibatch, with only the batch rows that it needs."""
        cuts = [slice(index * len(rows) // parts, (index + 1) * len(rows) // parts) for rows in self.rows]
        wanted = [rows[cut] for rows, cut in zip(self.rows, cuts, strict=True)]
        needed, place = np.unique(np.concatenate(wanted), return_inverse=True)
        weights = []
        for rows, cut, weight in zip(self.rows, cuts, self.weights, strict=True):
            offset_B = _offsets(self.batch.length_B[rows])
            weights.append(weight[offset_B[cut.start] : offset_B[cut.stop]])
        ends = np.cumsum([len(rows) for rows in wanted])[:-1]
        return replace(self, batch=self.batch.take(needed), rows=tuple(np.split(place, ends)), weights=tuple(weights))
