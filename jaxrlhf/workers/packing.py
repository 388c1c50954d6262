"""Sequences packed into rows of one width, so that every training program compiles once.

Sequences are placed first-fit by decreasing length; a row holds several, told apart by
segment ids. Where a token lies has no influence on what is computed for it, so packing is
invisible outside this room: arrays go in and come back as `[B, T]`.
"""

from collections.abc import Callable, Iterator

import numpy as np
from flax import struct

from jaxrlhf.batch import Array, Sequences


@struct.dataclass
class Rows:
    """Packed tokens.

    Attributes:
      token_RW: int32 ids.
      position_RW: int32 index of the token in its own sequence.
      segment_RW: int32, 0 is padding, sequences count from 1 in each row.
      mask_RW: bool, tokens that something is to be said of; those that the policy chose.
    """

    token_RW: Array
    position_RW: Array
    segment_RW: Array
    mask_RW: Array


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
    """Where each token of a batch lies in microbatches of `rows` by `row_tokens`.

    Args:
      length_B: Tokens of each sequence.
      width: T, columns of the batch's arrays.
      rows: Rows of one microbatch.
      row_tokens: Columns of one row.
      agree: Given how many microbatches the batch fills, how many to make: processes that run one program
        together have to make the same number.
    """

    def __init__(
        self,
        length_B: np.ndarray,
        *,
        width: int,
        rows: int,
        row_tokens: int,
        agree: Callable[[int], int] = lambda count: count,
    ) -> None:
        length_B = np.asarray(length_B)
        row_B, offset_B, used = first_fit_decreasing(length_B, row_tokens=row_tokens)
        self.microbatches = agree(max(1, -(-used // rows)))
        self._shape = (len(length_B), width)
        self._packed_shape = (self.microbatches, rows, row_tokens)
        inside_BT = np.arange(width) < length_B[:, None]
        self._source = np.nonzero(inside_BT)
        sequence, position = self._source
        self._target = (row_B[sequence] * row_tokens + offset_B[sequence] + position).astype(np.int64)
        rank_in_row = np.zeros(len(length_B), np.int32)
        for row in range(used):
            (members,) = np.nonzero(row_B == row)
            rank_in_row[members[np.argsort(offset_B[members], kind="stable")]] = np.arange(len(members))
        self._segment_B = rank_in_row + 1

    def pack(self, array_BT: Array) -> np.ndarray:
        """`[B, T]` to `[microbatches, R, W]`; padding is 0."""
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

    def rows(self, sequences: Sequences) -> Iterator[Rows]:
        """The packed tokens, one microbatch after another."""
        sequence, position = self._source
        position_BT, segment_BT = np.zeros(self._shape, np.int32), np.zeros(self._shape, np.int32)
        position_BT[self._source] = position
        segment_BT[self._source] = self._segment_B[sequence]
        arrays = (sequences.token_BT, position_BT, segment_BT, sequences.mask_BT)
        yield from (Rows(*parts) for parts in zip(*map(self.pack, arrays), strict=True))
