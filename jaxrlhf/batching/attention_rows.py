"""Attention rows: each sequence of a packed row whole, next to others of similar length."""

from collections.abc import Callable

import numpy as np

from jaxrlhf.batching.microbatch import SMALLEST_ROW
from jaxrlhf.models.attention.shared_prefix import AttentionRows, SharedPrefix

_SPARE_ROWS = 4
"""Initial capacity of the attention rows of a width, as a multiple of a packed row's tokens; doubled if too small."""


class AttentionPlaces:
    """Positions of a batch's sequences in attention rows. The cost depends on used rows, not on the capacity.

    Args:
      row_B: Packed row of each sequence, below `rows`.
      longest: Width of the widest attention row, in tokens.
      capacity: Capacity in attention rows, by width; increased in place if a batch needs more.
      agree: Elementwise maximum over processes.
    """

    def __init__(
        self,
        length_B: np.ndarray,
        row_B: np.ndarray,
        *,
        rows: int,
        row_tokens: int,
        longest: int,
        capacity: dict[int, int],
        agree: Callable[[np.ndarray], np.ndarray],
    ) -> None:
        self._row_B, widths = row_B, attention_widths(longest)
        self._width_B, self._attention_row_B, self._offset_B = np.zeros((3, len(length_B)), np.int64)
        for row in np.unique(row_B):
            (members,) = np.nonzero(row_B == row)
            placed = place(length_B[members], widths)
            self._width_B[members], self._attention_row_B[members], self._offset_B[members] = placed
        used = np.zeros((len(widths), rows), np.int32)
        for used_R, width in zip(used, widths, strict=True):
            np.maximum.at(used_R, row_B, np.where(self._width_B == width, self._attention_row_B + 1, 0))
        self._parts: list[tuple[int, int, np.ndarray]] = []  # width, capacity in rows, number of used rows
        for width, needed, used_R in zip(widths, agree(used.max(axis=1)).tolist(), used, strict=True):
            capacity.setdefault(width, -(-_SPARE_ROWS * row_tokens // width))
            while capacity[width] < needed:
                capacity[width] *= 2
            self._parts.append((width, capacity[width], used_R))

    def shared_prefix(
        self,
        rows: range,
        token: tuple[np.ndarray, ...],
        source: np.ndarray,
        segment_B: np.ndarray,
        is_primary: np.ndarray,
    ) -> SharedPrefix:
        """Return the whole sequences of some packed rows.

        Args:
          token: Sequence and position of every token in these rows; a shared token appears once per sequence.
          source: Position of each token in its packed row.
          is_primary: True for the copy of each token from which the packed row takes the result.
        """
        b, position = token
        row = self._row_B[b] - rows.start
        parts = []
        for width, count, used_R in self._parts:
            inside = self._width_B[b] == width
            shape = len(rows), count, width
            at = tuple(index[inside] for index in (row, self._attention_row_B[b], self._offset_B[b] + position))
            parts.append(
                AttentionRows(
                    source_RAS=_table(source.astype(np.int32)[inside], at, shape),
                    segment_RAS=_table(segment_B[b][inside], at, shape),
                    is_primary_RAS=_table(is_primary[inside], at, shape),
                    used_R=used_R[rows.start : rows.stop],
                )
            )
        return SharedPrefix(tuple(parts))


def _table(entries: np.ndarray, at: tuple[np.ndarray, ...], shape: tuple[int, ...]) -> np.ndarray:
    """Scatter entries to their positions in an array of zeros."""
    table = np.zeros(shape, entries.dtype)
    table[at] = entries
    return table


def attention_widths(longest: int) -> list[int]:
    """Return the widths of attention rows, ascending: the longest sequence's width, and its repeated halves."""
    widths = [longest]
    while widths[0] % 2 == 0 and widths[0] // 2 >= SMALLEST_ROW:
        widths.insert(0, widths[0] // 2)
    return widths


def place(length_N: np.ndarray, widths: list[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the row width of each sequence, the row's index among rows of that width, and the offset in the row.

    First fit by decreasing length: a sequence goes to the first row with enough room, or opens a row of the
    smallest width that fits.

    Args:
      widths: Row widths, ascending.

    Raises:
      ValueError: A sequence is longer than the widest row.
    """
    if len(length_N) and length_N.max() > widths[-1]:
        raise ValueError(f"a sequence of {length_N.max()} tokens does not fit a row of {widths[-1]}")
    width_N, row_N, offset_N = np.zeros((3, len(length_N)), np.int64)
    opened = dict.fromkeys(widths, 0)
    rows: list[list[int]] = []  # width, index, tokens used
    for n in np.argsort(-length_N, kind="stable"):
        length = int(length_N[n])
        row = next((row for row in rows if row[2] + length <= row[0]), None)
        if row is None:
            width = next(width for width in widths if width >= length)
            rows.append(row := [width, opened[width], 0])
            opened[width] += 1
        width_N[n], row_N[n], offset_N[n] = row
        row[2] += length
    return width_N, row_N, offset_N
