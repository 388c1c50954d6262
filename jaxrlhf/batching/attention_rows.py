"""Attention rows: every sequence of a packed row whole, beside others of like length."""

from collections.abc import Callable

import numpy as np

from jaxrlhf.batching.microbatch import SMALLEST_ROW
from jaxrlhf.models.attention.shared_prefix import AttentionRows, SharedPrefix

_ROOM = 4
"""Multiple of a packed row's tokens that each width has room for from the start; doubled where that is too few."""


class AttentionPlaces:
    """Places of a batch's sequences in attention rows. Costs follow the rows in use, not the room there is.

    Args:
      row_B: Packed row of each sequence, below `rows`.
      longest: Tokens of the widest attention row.
      room: Attention rows of each width that there is room for; grows where a batch needs more.
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
        room: dict[int, int],
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
        self._parts: list[tuple[int, int, np.ndarray]] = []  # width, attention rows, how many are used
        for width, needed, used_R in zip(widths, agree(used.max(axis=1)).tolist(), used, strict=True):
            room.setdefault(width, -(-_ROOM * row_tokens // width))
            while room[width] < needed:
                room[width] *= 2
            self._parts.append((width, room[width], used_R))

    def shared_prefix(
        self,
        rows: range,
        token: tuple[np.ndarray, ...],
        source: np.ndarray,
        segment_B: np.ndarray,
        tells: np.ndarray,
    ) -> SharedPrefix:
        """Whole sequences of some packed rows.

        Args:
          token: Sequence and position of every token in these rows; shared ones once for each sequence.
          source: Place of each token in its packed row.
          tells: True if the token of the packed row takes its result from this one.
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
                    tells_RAS=_table(tells[inside], at, shape),
                    used_R=used_R[rows.start : rows.stop],
                )
            )
        return SharedPrefix(tuple(parts))


def _table(entries: np.ndarray, at: tuple[np.ndarray, ...], shape: tuple[int, ...]) -> np.ndarray:
    """Entries in their places, zeros between."""
    table = np.zeros(shape, entries.dtype)
    table[at] = entries
    return table


def attention_widths(longest: int) -> list[int]:
    """Widths of attention rows, ascending: the longest sequence's, and that halved some times."""
    widths = [longest]
    while widths[0] % 2 == 0 and widths[0] // 2 >= SMALLEST_ROW:
        widths.insert(0, widths[0] // 2)
    return widths


def place(length_N: np.ndarray, widths: list[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Width of each sequence's row, its number among those of that width, and the offset in it.

    Sequences go by decreasing length into the first row with room, which is as narrow as its longest allows.

    Args:
      widths: Ascending.

    Raises:
      ValueError: A sequence is longer than the widest row.
    """
    if len(length_N) and length_N.max() > widths[-1]:
        raise ValueError(f"a sequence of {length_N.max()} tokens does not fit a row of {widths[-1]}")
    width_N, row_N, offset_N = np.zeros((3, len(length_N)), np.int64)
    opened = dict.fromkeys(widths, 0)
    rows: list[list[int]] = []  # width, number, tokens taken
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
