"""Packing of sequences into rows of one width, so that every training program compiles once.

Sequences are placed first-fit by decreasing length; a row holds several, separated by segment ids. Responses to one
prompt may share it: the row then holds the prompt once. Attention either sees each sequence whole, in attention rows,
or runs on the packed row with the prompt and sequence of each token. The position of a token in a row does not affect
its results, so callers do not see the packing: columns of tokens go in and come back in the order of the sequences.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import field
from itertools import repeat
from typing import Any

import jax
import numpy as np
from flax import struct

from jaxrlhf.batch import Array
from jaxrlhf.batching.attention_rows import AttentionPlaces
from jaxrlhf.batching.image_places import ImagePlaces
from jaxrlhf.batching.microbatch import (
    WORTH_A_PROGRAM,
    WORTH_SHARING,
    MicrobatchShape,
    microbatch_shape_of,
    sizes_of,
)
from jaxrlhf.batching.placed_units import place_units
from jaxrlhf.batching.ragged import RaggedBatch
from jaxrlhf.batching.shared_prompts import shared_prefixes
from jaxrlhf.models.attention.attention_xla import SharedTokens
from jaxrlhf.models.attention.shared_prefix import SharedPrefix
from jaxrlhf.models.config import Vision
from jaxrlhf.models.vision.rows import ImageRows, Pixels, StripShape, no_pixels


@struct.dataclass
class PackedBatch:
    """Packed tokens of one microbatch.

    Attributes:
      token_RW: int32 ids.
      position_RW: int32 index of the token in its own sequence.
      segment_RW: int32, 0 is padding, sequences count from 1 in each row. A shared prompt has the segment of one of its
        responses.
      mask_RW: bool, response tokens.
      recorded: Columns that the sampler recorded, by name, `[R, W, ...]`, as in `Sequences.recorded`.
      shared_prefix: Whole sequences for attention (`SharedPrefix`), or prompt and sequence of each token
        (`SharedTokens`); None if no prompt is shared.
      images: Images of the rows; None if no process has any.
    """

    token_RW: Array
    position_RW: Array
    segment_RW: Array
    mask_RW: Array
    shared_prefix: SharedPrefix | SharedTokens | None = None
    images: ImageRows | None = None
    recorded: Mapping[str, Array] = field(default_factory=dict)


def _worth_sharing(batch: RaggedBatch, shared_B: np.ndarray) -> bool:
    """Return True if prompts have at least two responses on average, and sharing prompts saves enough tokens."""
    copies_B = np.unique(batch.prompt_id_B, return_inverse=True, return_counts=True)
    prompts, saved = len(copies_B[0]), (shared_B * (1 - 1 / copies_B[2][copies_B[1]])).sum()
    return bool(2 * prompts <= len(shared_B) and saved >= WORTH_SHARING * batch.offset_B[-1])


class Packing:
    """Positions of a batch's tokens in microbatches of rows.

    Args:
      batch: Sequences of this process, whose `width` is the maximum sequence length.
      rows: Maximum number of rows of a microbatch on one device.
      row_tokens: Number of columns of a row, a multiple of the maximum sequence length.
      devices: Number of data-parallel devices of this process.
      token_shards: Number of devices that split a row's tokens.
      longest_response: Maximum length of a response in tokens; None is unknown.
      prompts: Number of distinct prompts that shapes are chosen for (at most the number of sequences). It gives batches
        with as many sequences but other numbers of prompts the same shape. None counts the prompts of the sequences.
      shares: True stores shared prompts once per row, if this saves enough tokens.
      in_rows: True lets attention run on rows with shared prompts directly, if this is faster.
      attention_rows: Capacity in attention rows, by width; increased in place if a batch needs more.
      vision: Vision tower of the model; None takes no images.
      patch_capacity: Capacity of a row in strips and patches; increased in place if this batch needs more.
      agree: Elementwise maximum over processes: processes that run one program together need equal numbers of
        microbatches of equal shapes.
    """

    def __init__(
        self,
        batch: RaggedBatch,
        *,
        rows: int,
        row_tokens: int,
        devices: int = 1,
        stages: int = 1,
        token_shards: int = 1,
        longest_response: int | None = None,
        prompts: int | None = None,
        together: int = 1,
        shares: bool = True,
        in_rows: bool = False,
        attention_rows: dict[int, int] | None = None,
        vision: Vision | None = None,
        pixels: Pixels = no_pixels,
        patch_capacity: list[StripShape] | None = None,
        agree: Callable[[np.ndarray], np.ndarray] = lambda numbers: numbers,
    ) -> None:
        length_B = batch.length_B.astype(np.int64)
        shared_B = shared_prefixes(batch)
        counts = len(length_B), min(len(length_B), prompts or len(np.unique(batch.prompt_id_B)))
        worth = shares and _worth_sharing(batch, shared_B)
        each, prompts, shares = agree(np.array([*(-(-count // devices) for count in counts), worth])).tolist()
        longest = batch.width
        split: dict[str, Any] = {"together": together, "stages": stages, "token_shards": token_shards}
        shares = bool(shares)
        counted: dict[str, Any] = {"sequences": each, "prompts": prompts, "longest_response": longest_response}
        largest = microbatch_shape_of(rows, row_tokens, longest=longest, shares=shares, **counted, **split)
        self._shared_B = shared_B = shared_B * shares
        own_tokens_B = length_B - shared_B
        sizes = sizes_of(largest, rows, longest=longest, shares=shares, **split)
        how: dict[str, Any] = {"devices": devices, "together": together, "agree": agree}
        placed = place_units(length_B, shared_B, batch.prompt_id_B, sizes, **how)
        shape, self.microbatches, self._units, row_U, offset_U = placed
        rows, width = shape.rows * devices, shape.row_tokens
        self._batch, self._packed_shape = batch, (self.microbatches, rows, width)
        self._devices = devices
        self._row_B, prompt_B, own_B = np.zeros((3, len(length_B)), np.int64)
        self._segment_B = np.zeros(len(length_B), np.int32)
        taken = np.zeros(int(row_U.max(initial=-1)) + 1, np.int32)
        for unit, row, offset in zip(self._units, row_U, offset_U, strict=True):
            own = own_tokens_B[unit]
            self._row_B[unit], prompt_B[unit] = row, offset
            own_B[unit] = offset + shared_B[unit] + np.cumsum(own) - own
            self._segment_B[unit] = taken[row] + 1 + np.arange(len(unit))
            taken[row] += len(unit)
        self._source = b, position = batch.position
        self._place = np.where(position < shared_B[b], prompt_B[b] + position, own_B[b] + position - shared_B[b])
        self._target = self._row_B[b] * width + self._place
        self._pixels = pixels
        self._images: ImagePlaces | None = None
        if vision is not None:
            count, capacity = self.microbatches * rows, [] if patch_capacity is None else patch_capacity
            places = ImagePlaces(vision, batch.images_B, self._row_B, rows=count, capacity=capacity, agree=agree)
            self._images = places if places.any else None
        self._trimmed = [shape] * self.microbatches
        if self._images is None:
            self._trimmed = self._trim_shapes(shape, sizes, agree)
        self._attention: AttentionPlaces | None = None
        self._in_rows = bool(shares) and in_rows and shape.attends_in_rows
        if shares and not self._in_rows:
            self._attention = AttentionPlaces(
                length_B,
                self._row_B,
                rows=self.microbatches * rows,
                row_tokens=width,
                longest=row_tokens,
                capacity={} if attention_rows is None else attention_rows,
                agree=agree,
            )

    def _trim_shapes(
        self, shape: MicrobatchShape, sizes: Sequence[MicrobatchShape], agree: Callable[[np.ndarray], np.ndarray]
    ) -> list[MicrobatchShape]:
        """Return the smallest size that holds each microbatch's tokens, if this saves enough for further programs."""
        used_M2 = np.ones((self.microbatches, 2), np.int64)
        rows, width = shape.rows, shape.row_tokens
        row, place = np.divmod(self._target, width)
        index = row // (rows * self._devices)
        np.maximum.at(used_M2[:, 0], index, row % rows + 1)
        np.maximum.at(used_M2[:, 1], index, place + 1)
        smaller = [size for size in sizes if size.rows <= rows and size.row_tokens <= width]
        found = [
            next((size for size in smaller if size.rows >= used and size.row_tokens >= tokens), shape)
            for used, tokens in agree(used_M2).tolist()
        ]
        saved = 1 - sum(size.tokens for size in found) / (shape.tokens * self.microbatches)
        return found if saved >= WORTH_A_PROGRAM else [shape] * self.microbatches

    def pack(self, column: np.ndarray) -> np.ndarray:
        """Pack `[tokens]` to `[microbatches, R, W]`, padded with 0; one copy of a shared token is stored."""
        more = column.shape[1:]
        packed = np.zeros((int(np.prod(self._packed_shape)), *more), column.dtype)
        packed[self._target] = column
        return packed.reshape(*self._packed_shape, *more)

    def trim(self, array_RW: Array, index: int) -> np.ndarray:
        """Return the rows and columns of a microbatch's `[R, W, ...]` array that its program computes."""
        shape = self._trimmed[index]
        by_device = np.asarray(array_RW).reshape(self._devices, -1, *np.shape(array_RW)[1:])
        return by_device[:, : shape.rows, : shape.row_tokens].reshape(-1, shape.row_tokens, *np.shape(array_RW)[2:])

    def unpack(self, packed: Sequence[Array]) -> np.ndarray:
        """Unpack each microbatch's `[R, W, ...]`, whole or trimmed, to `[tokens, ...]`."""
        more, dtype = np.shape(packed[0])[2:], np.asarray(packed[0]).dtype
        whole = np.zeros(
            (self.microbatches, self._devices, self._packed_shape[1] // self._devices, self._packed_shape[2], *more),
            dtype,
        )
        for part, whole_DRW in zip(packed, whole, strict=True):
            by_device = np.asarray(part).reshape(self._devices, -1, *np.shape(part)[1:])
            whole_DRW[:, : by_device.shape[1], : by_device.shape[2]] = by_device
        unpacked: np.ndarray = whole.reshape(-1, *more)[self._target]
        return unpacked

    def rows(self) -> Iterator[PackedBatch]:
        """Yield the packed tokens of each microbatch."""
        b, position = self._source
        columns = self._batch.columns
        packed = PackedBatch(
            token_RW=self.pack(columns["token"]),
            position_RW=self.pack(position.astype(np.int32)),
            segment_RW=self.pack(self._segment_B[b]),
            mask_RW=self.pack(columns["mask"]),
            recorded={name: self.pack(of + 1) - 1 for name, of in columns["recorded"].items()},  # -1 in padding
        )
        prefixes: Iterable[Any] = repeat(None)
        if self._in_rows:
            prefixes = self._shared_tokens(packed.position_RW)
        elif self._attention is not None:
            prefixes = self._shared_prefixes(self._attention)
        images: Iterable[Any] = repeat(None)
        if self._images is not None:
            each = self._packed_shape[1]
            images = self._images.rows(self._batch.length_B, self.pack, self._pixels, each=each)
        for index, shared, seen in zip(range(self.microbatches), prefixes, images, strict=False):
            part = jax.tree.map(lambda array, i=index: self.trim(array[i], i), packed)
            if isinstance(shared, SharedTokens):
                shared = SharedTokens(*(self.trim(array, index) for array in shared))
            yield part.replace(shared_prefix=shared, images=seen)

    def _shared_tokens(self, position_MRW: Array) -> Iterator[SharedTokens]:
        """Yield the prompt and sequence of each token, for each microbatch."""
        b, position = self._source
        group_B = np.zeros(len(self._shared_B), np.int32)
        for number, unit in enumerate(self._units, 1):
            group_B[unit] = number
        own = np.where(position < self._shared_B[b], np.int32(0), self._segment_B[b])
        yield from map(SharedTokens, self.pack(group_B[b]), self.pack(own), np.asarray(position_MRW))

    def _shared_prefixes(self, attention: AttentionPlaces) -> Iterator[SharedPrefix]:
        """Yield the whole sequences of each microbatch, as attention sees them."""
        b, position = self._source
        first = np.zeros(len(b), bool)
        first[np.unique(self._target, return_index=True)[1]] = True  # the first copy of each token
        count = self._packed_shape[1]
        microbatch = self._row_B[b] // count
        ends = np.cumsum(np.bincount(microbatch, minlength=self.microbatches))
        for index, own in enumerate(np.split(np.argsort(microbatch, kind="stable"), ends[:-1])):
            rows, token = range(index * count, (index + 1) * count), (b[own], position[own])
            yield attention.shared_prefix(rows, token, self._place[own], self._segment_B, first[own])
