"""Packing is invisible: what goes in comes out, and a token's neighbours in a row do not matter."""

import numpy as np
import pytest

from jaxrlhf.batch import Sequences
from jaxrlhf.workers.packing import Packing, first_fit_decreasing


def random_lengths(seed: int, *, count: int, width: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(1, width + 1, count).astype(np.int32)


@pytest.mark.parametrize("seed", range(3))
def test_rows_hold_every_sequence_once_and_never_overflow(seed: int) -> None:
    length_B = random_lengths(seed, count=50, width=20)
    row_B, offset_B, rows = first_fit_decreasing(length_B, row_tokens=32)
    taken = np.zeros((rows, 32), int)
    for row, offset, length in zip(row_B, offset_B, length_B, strict=True):
        taken[row, offset : offset + length] += 1
        assert offset + length <= 32
    assert taken.max() == 1
    assert taken.sum() == length_B.sum()


@pytest.mark.parametrize("rows", [1, 3, 64])
def test_pack_and_unpack_are_inverse(rows: int) -> None:
    length_B = random_lengths(0, count=30, width=16)
    inside_BT = np.arange(16) < length_B[:, None]
    value_BT = np.where(inside_BT, np.random.default_rng(1).normal(size=(30, 16)), 0.0)
    packing = Packing(length_B, width=16, rows=rows, row_tokens=24)
    packed = packing.pack(value_BT)
    assert packed.shape == (packing.microbatches, rows, 24)
    np.testing.assert_array_equal(packing.unpack(packed), value_BT)


def test_positions_and_segments_follow_the_sequences() -> None:
    length_B = np.array([5, 3, 4], np.int32)
    token_BT = np.arange(1, 19, dtype=np.int32).reshape(3, 6) * (np.arange(6) < length_B[:, None])
    sequences = Sequences(token_BT, length_B, token_BT > 0, np.arange(3))
    (rows,) = Packing(length_B, width=6, rows=2, row_tokens=8).rows(sequences)
    for row in range(2):
        for segment in range(1, rows.segment_RW[row].max() + 1):
            (where,) = np.nonzero(rows.segment_RW[row] == segment)
            np.testing.assert_array_equal(rows.position_RW[row, where], np.arange(len(where)))
            assert list(rows.token_RW[row, where]) in [list(t[:n]) for t, n in zip(token_BT, length_B, strict=True)]
    assert sum(row.max() for row in rows.segment_RW) == 3


def test_a_sequence_longer_than_a_row_is_refused() -> None:
    with pytest.raises(ValueError, match="9 tokens does not fit a row of 8"):
        first_fit_decreasing(np.array([9]), row_tokens=8)
