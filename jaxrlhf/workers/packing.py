"""Sequences packed into rows of one width, so that every training program compiles once.

Sequences are placed first-fit by decreasing length; a row holds several, told apart by segment
ids. Where responses share a prompt, their row holds it once, and attention alone sees each of
them whole. Where a token lies has no influence on what is computed for it, so packing is
invisible outside this room: arrays go in and come back as `[B, T]`.
"""

from collections.abc import Callable, Iterator

import jax
import numpy as np
from flax import struct

from jaxrlhf.batch import Array, Sequences
from jaxrlhf.models.spread import Spread
from jaxrlhf.workers.prompts import shared_prefixes, units_of

_WORTH_SHARING = 0.1
"""Of a batch's tokens. Laying out attention by itself costs about half of that."""
_ATTENTION_ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Few shapes to compile."""


@struct.dataclass
class Rows:
    """Packed tokens.

    Attributes:
      token_RW: int32 ids.
      position_RW: int32 index of the token in its own sequence.
      segment_RW: int32, 0 is padding, sequences count from 1 in each row. A prompt in common has the
        segment of one of its responses.
      mask_RW: bool, tokens that something is to be said of; those that the policy chose.
      spread: Where responses share prompts, how attention sees them; None is as they lie.
    """

    token_RW: Array
    position_RW: Array
    segment_RW: Array
    mask_RW: Array
    spread: Spread | None = None


def first_fit_decreasing(length_B: np.ndarray, *, row_tokens: int) -> tuple[np.ndarray, np.ndarray, int]:
    """Row and offset of each sequence, and the number of rows.

    Raises:
      ValueError: A sequence is longer than a row.
    """
    if len(length_B) and length_B.max() > row_tokens:
        raise ValueError(f"a sequence of {length_B.max()} tokens does not fit a row of {row_tokens}")
    row_B, offset_B = np.zeros(len(length_B), np.int64), np.zeros(len(length_B), np.int64)
    used: list[int] = []
    for b in np.argsort(-length_B, kind="stable"):
        length = int(length_B[b])
        row = next((r for r, filled in enumerate(used) if filled + length <= row_tokens), len(used))
        if row == len(used):
            used.append(0)
        row_B[b], offset_B[b] = row, used[row]
        used[row] += length
    return row_B, offset_B, len(used)


class Packing:
    """Where each token of a batch lies in microbatches of rows.

    Args:
      sequences: Of this process.
      rows: Rows of one microbatch.
      row_tokens: Columns of one row, at least the longest sequence.
      merged: Where prompts are shared, so many rows become one, which holds more responses to a prompt.
      agree: Given a number, the largest that any process gives: processes that run one program together have to make
        the same number of microbatches of the same shape.
    """

    def __init__(
        self,
        sequences: Sequences,
        *,
        rows: int,
        row_tokens: int,
        merged: int = 1,
        agree: Callable[[int], int] = lambda number: number,
    ) -> None:
        length_B = np.asarray(sequences.length_B).astype(np.int64)
        shared_B = _worthwhile(sequences)
        shares = bool(agree(int(shared_B.any())))
        width = row_tokens * merged if shares else row_tokens
        rows = rows // merged if shares else rows
        units = units_of(length_B, shared_B, np.asarray(sequences.prompt_id_B), row_tokens=width)
        total_U = np.array([shared_B[unit[0]] + (length_B - shared_B)[unit].sum() for unit in units], np.int64)
        row_U, offset_U, used = first_fit_decreasing(total_U, row_tokens=width)
        self.microbatches = agree(max(1, -(-used // rows)))
        self._sequences, self._shape = sequences, np.shape(sequences.token_BT)
        self._packed_shape = (self.microbatches, rows, width)
        self._row_B, prompt_B, own_B = np.zeros((3, len(length_B)), np.int64)
        self._segment_B = np.zeros(len(length_B), np.int32)
        taken = np.zeros(used, np.int32)
        for unit, row, offset in zip(units, row_U, offset_U, strict=True):
            own = (length_B - shared_B)[unit]
            self._row_B[unit], prompt_B[unit] = row, offset
            own_B[unit] = offset + shared_B[unit] + np.cumsum(own) - own
            self._segment_B[unit] = taken[row] + 1 + np.arange(len(unit))
            taken[row] += len(unit)
        inside_BT = np.arange(self._shape[1]) < length_B[:, None]
        self._source = b, position = np.nonzero(inside_BT)
        place = np.where(position < shared_B[b], prompt_B[b] + position, own_B[b] + position - shared_B[b])
        self._target = self._row_B[b] * width + place
        self._spread = self._spread_out(length_B, place, row_tokens, agree) if shares else None

    def _spread_out(
        self, length_B: np.ndarray, place: np.ndarray, row_tokens: int, agree: Callable[[int], int]
    ) -> Spread:
        """Every sequence whole, in attention rows that belong to the row it is packed in."""
        attention_row_B, offset_B, most = np.zeros_like(length_B), np.zeros_like(length_B), 1
        for row in np.unique(self._row_B):
            (members,) = np.nonzero(self._row_B == row)
            attention_row_B[members], offset_B[members], count = first_fit_decreasing(
                length_B[members], row_tokens=row_tokens
            )
            most = max(most, count)
        wanted = agree(most)
        attention_rows = next((rows for rows in _ATTENTION_ROWS if rows >= wanted), wanted)
        microbatches, rows, width = self._packed_shape
        b, position = self._source
        entry = attention_row_B[b] * row_tokens + offset_B[b] + position
        source, segment = np.zeros((2, microbatches * rows, attention_rows * row_tokens), np.int32)
        home = np.zeros((microbatches * rows, width), np.int32)
        source[self._row_B[b], entry] = place
        segment[self._row_B[b], entry] = self._segment_B[b]
        home[self._row_B[b], place] = entry
        shape = (microbatches, rows, attention_rows, row_tokens)
        return Spread(source.reshape(shape), segment.reshape(shape), home.reshape(self._packed_shape))

    def pack(self, array_BT: Array) -> np.ndarray:
        """`[B, T]` to `[microbatches, R, W]`; padding is 0. Of tokens in common, one sequence's value is taken."""
        array_BT = np.asarray(array_BT)
        packed = np.zeros(int(np.prod(self._packed_shape)), array_BT.dtype)
        packed[self._target] = array_BT[self._source]
        return packed.reshape(self._packed_shape)

    def unpack(self, packed: Array) -> np.ndarray:
        """`[microbatches, R, W]` back to `[B, T]`; what lies past a length is 0."""
        flat = np.asarray(packed).reshape(-1)
        array_BT = np.zeros(self._shape, flat.dtype)
        array_BT[self._source] = flat[self._target]
        return array_BT

    def rows(self) -> Iterator[Rows]:
        """The packed tokens, one microbatch after another."""
        b, position = self._source
        position_BT, segment_BT = np.zeros((2, *self._shape), np.int32)
        position_BT[self._source] = position
        segment_BT[self._source] = self._segment_B[b]
        arrays = (self._sequences.token_BT, position_BT, segment_BT, self._sequences.mask_BT)
        for index, parts in enumerate(zip(*map(self.pack, arrays), strict=True)):
            spread = None if self._spread is None else jax.tree.map(lambda x, i=index: x[i], self._spread)
            yield Rows(*parts, spread)


def _worthwhile(sequences: Sequences) -> np.ndarray:
    """The shared prefixes; none where they are too few tokens."""
    shared_B = shared_prefixes(sequences)
    prompts, count_B = np.unique(np.asarray(sequences.prompt_id_B), return_inverse=True, return_counts=True)[1:]
    saved = (shared_B * (1 - 1 / count_B[prompts])).sum()
    return shared_B if saved >= _WORTH_SHARING * np.sum(sequences.length_B) else np.zeros_like(shared_B)
