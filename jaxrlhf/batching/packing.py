"""Sequences packed into rows of one width, so that every training program compiles once.

Sequences are placed first-fit by decreasing length; a row holds several, told apart by segment
ids. Where responses share a prompt, their row holds it once, and attention alone sees each of
them whole. Where a token lies has no influence on what is computed for it, so packing is
invisible outside this room: arrays go in and come back as `[B, T]`.
"""

from collections.abc import Callable, Iterator
from itertools import repeat

import jax
import numpy as np
from flax import struct

from jaxrlhf.batch import Array, Sequences
from jaxrlhf.batching.attention_rows import AttentionPlaces
from jaxrlhf.batching.microbatch import WORTH_SHARING, microbatch_shape_of
from jaxrlhf.batching.shared_prompts import shared_prefixes, units_of
from jaxrlhf.models.attention.shared_prefix import SharedPrefix


@struct.dataclass
class PackedBatch:
    """Packed tokens.

    Attributes:
      token_RW: int32 ids.
      position_RW: int32 index of the token in its own sequence.
      segment_RW: int32, 0 is padding, sequences count from 1 in each row. A prompt in common has the
        segment of one of its responses.
      mask_RW: bool, tokens that something is to be said of; those that the policy chose.
      choice_RWLk: int16, experts to take again, negative where routers choose; None leaves all to them.
      shared_prefix: Where responses share prompts, how attention sees them; None is as they lie.
    """

    token_RW: Array
    position_RW: Array
    segment_RW: Array
    mask_RW: Array
    choice_RWLk: Array | None = None
    shared_prefix: SharedPrefix | None = None


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


def _worth_sharing(sequences: Sequences, shared_B: np.ndarray) -> bool:
    """Whether a prompt has two responses on average, and what they have in common is more than a little."""
    copies_B = np.unique(np.asarray(sequences.prompt_id_B), return_inverse=True, return_counts=True)
    prompts, saved = len(copies_B[0]), (shared_B * (1 - 1 / copies_B[2][copies_B[1]])).sum()
    return bool(2 * prompts <= len(shared_B) and saved >= WORTH_SHARING * np.sum(sequences.length_B))


class _Plan:
    """Which sequences lie in which row. Each needs its own tokens there, and its prompt once those in common."""

    def __init__(self, sequences: Sequences, shared_B: np.ndarray, row_tokens: int) -> None:
        length_B, prompt_id_B = np.asarray(sequences.length_B).astype(np.int64), np.asarray(sequences.prompt_id_B)
        self.units = units_of(length_B, shared_B, prompt_id_B, row_tokens=row_tokens)
        total_U = np.array([shared_B[unit[0]] + (length_B - shared_B)[unit].sum() for unit in self.units], np.int64)
        self.row_U, self.offset_U, self.rows = first_fit_decreasing(total_U, row_tokens=row_tokens)


class Packing:
    """Where each token of a batch lies in microbatches of rows.

    Args:
      sequences: Of this process; their arrays are as wide as the longest there may be.
      rows: Of a microbatch on one device, at most.
      row_tokens: Columns of one row, a multiple of the longest sequence.
      devices: Data-parallel devices of this process.
      stages: Of the pipeline.
      longest_response: Tokens of it; None is not known.
      shares: Prompts that responses share lie in a row once, if that is worth it.
      attention_rows: Room for each width of them, over all batches so far; grows where one needs more.
      agree: Given numbers, the largest of each that any process gives: processes that run one program together have to
        make the same number of microbatches of the same shapes.
    """

    def __init__(
        self,
        sequences: Sequences,
        *,
        rows: int,
        row_tokens: int,
        devices: int = 1,
        stages: int = 1,
        longest_response: int | None = None,
        shares: bool = True,
        attention_rows: dict[int, int] | None = None,
        agree: Callable[[np.ndarray], np.ndarray] = lambda numbers: numbers,
    ) -> None:
        length_B = np.asarray(sequences.length_B).astype(np.int64)
        shared_B = shared_prefixes(sequences)
        counts = len(length_B), len(np.unique(np.asarray(sequences.prompt_id_B)))
        worth = shares and _worth_sharing(sequences, shared_B)
        each, prompts, shares = agree(np.array([*(-(-count // devices) for count in counts), worth])).tolist()
        shape = microbatch_shape_of(
            rows,
            row_tokens,
            sequences=each,
            longest=sequences.token_BT.shape[1],
            stages=stages,
            shares=bool(shares),
            prompts=prompts,
            longest_response=longest_response,
        )
        if not shares:
            shared_B = np.zeros_like(shared_B)
        plan, rows, width = _Plan(sequences, shared_B, shape.row_tokens), shape.rows * devices, shape.row_tokens
        self.microbatches = int(agree(np.array(max(1, -(-plan.rows // rows)))))
        self._sequences, self._shape = sequences, np.shape(sequences.token_BT)
        self._packed_shape = (self.microbatches, rows, width)
        self._row_B, prompt_B, own_B = np.zeros((3, len(length_B)), np.int64)
        self._segment_B = np.zeros(len(length_B), np.int32)
        taken = np.zeros(plan.rows, np.int32)
        for unit, row, offset in zip(plan.units, plan.row_U, plan.offset_U, strict=True):
            own = (length_B - shared_B)[unit]
            self._row_B[unit], prompt_B[unit] = row, offset
            own_B[unit] = offset + shared_B[unit] + np.cumsum(own) - own
            self._segment_B[unit] = taken[row] + 1 + np.arange(len(unit))
            taken[row] += len(unit)
        inside_BT = np.arange(self._shape[1]) < length_B[:, None]
        self._source = b, position = np.nonzero(inside_BT)
        place = np.where(position < shared_B[b], prompt_B[b] + position, own_B[b] + position - shared_B[b])
        self._target = self._row_B[b] * width + place
        self._place = place
        self._attention: AttentionPlaces | None = None
        if shares:
            self._attention = AttentionPlaces(
                length_B,
                self._row_B,
                rows=self.microbatches * rows,
                row_tokens=width,
                longest=row_tokens,
                room={} if attention_rows is None else attention_rows,
                agree=agree,
            )

    def pack(self, array_BT: Array) -> np.ndarray:
        """`[B, T]` to `[microbatches, R, W]`; padding is 0. Of tokens in common, one sequence's value is taken."""
        array_BT = np.asarray(array_BT)
        more = array_BT.shape[2:]
        packed = np.zeros((int(np.prod(self._packed_shape)), *more), array_BT.dtype)
        packed[self._target] = array_BT[self._source]
        return packed.reshape(*self._packed_shape, *more)

    def unpack(self, packed: Array) -> np.ndarray:
        """`[microbatches, R, W]` back to `[B, T]`; what lies past a length is 0."""
        flat = np.asarray(packed).reshape(-1)
        array_BT = np.zeros(self._shape, flat.dtype)
        array_BT[self._source] = flat[self._target]
        return array_BT

    def rows(self) -> Iterator[PackedBatch]:
        """The packed tokens, one microbatch after another."""
        b, position = self._source
        choice_BTLk = self._sequences.choice_BTLk
        position_BT, segment_BT = np.zeros((2, *self._shape), np.int32)
        position_BT[self._source] = position
        segment_BT[self._source] = self._segment_B[b]
        packed = PackedBatch(
            token_RW=self.pack(self._sequences.token_BT),
            position_RW=self.pack(position_BT),
            segment_RW=self.pack(segment_BT),
            mask_RW=self.pack(self._sequences.mask_BT),
            choice_RWLk=None if choice_BTLk is None else self.pack(choice_BTLk + 1) - 1,  # -1 in padding
        )
        spreads = repeat(None) if self._attention is None else self._spreads(self._attention)
        for index, spread in zip(range(self.microbatches), spreads, strict=False):
            yield jax.tree.map(lambda array, i=index: array[i], packed).replace(shared_prefix=spread)

    def _spreads(self, attention: AttentionPlaces) -> Iterator[SharedPrefix]:
        """How attention sees each microbatch."""
        b, position = self._source
        first = np.zeros(len(b), bool)
        first[np.unique(self._target, return_index=True)[1]] = True  # of all copies of a token
        count = self._packed_shape[1]
        microbatch = self._row_B[b] // count
        ends = np.cumsum(np.bincount(microbatch, minlength=self.microbatches))
        for index, own in enumerate(np.split(np.argsort(microbatch, kind="stable"), ends[:-1])):
            rows, token = range(index * count, (index + 1) * count), (b[own], position[own])
            yield attention.spread(rows, token, self._place[own], self._segment_B, first[own])
