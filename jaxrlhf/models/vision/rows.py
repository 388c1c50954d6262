"""Images of rows: their patches in strips, and the tokens that their features replace. Host work, in NumPy.

Letters in addition to the letters of `jaxrlhf.batch`: `J` strips of a row, `Q` patches of a strip, `C` numbers of a
patch, `M` features of a row. Patches attend only within their strip, so the cost of images in a row is not quadratic.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from jaxrlhf.batch import Array, Image
from jaxrlhf.config import Refusal
from jaxrlhf.models.config import Vision

Pixels = Callable[[Image], np.ndarray]
"""Function from an image to its patches, `[Q, C]`; the patches of a square that becomes one feature are adjacent."""


class ImageRows(NamedTuple):
    """Images of packed rows, or of prompts, as inputs of a model in addition to the tokens.

    Attributes:
      pixel_RJQC: float32, patches of the images of each row, window by window; each image is in a single strip.
      place_RJQ2: int32, row and column of each patch in its image.
      segment_RJQ: int32, number of the patch's frame in its strip, from 1; 0 is padding.
      window_RJQ: int32, number of the patch's window in its strip, from 1; 0 is padding.
      corner_RJQ4: int32, the four rows of the position table around the patch.
      share_RJQ4: float32, interpolation weights of these four rows; they sum to 1.
      feature_RW: int32, index of the row's feature that replaces the token; -1 is text.
      block_RW: int32, number of the token's image in its sequence, from 1; 0 is text.
      mrope_position_RW3: int32, time, row and column of the token, for rotary positions.
    """

    pixel_RJQC: Array
    place_RJQ2: Array
    segment_RJQ: Array
    window_RJQ: Array
    corner_RJQ4: Array
    share_RJQ4: Array
    feature_RW: Array
    block_RW: Array
    mrope_position_RW3: Array


def no_pixels(image: Image) -> np.ndarray:
    """Raise `Refusal`: the `Pixels` function of models and engines that have no other."""
    raise Refusal(
        f"the image {image.source} cannot be read without an image processor; set pixels, a function from images to "
        "patches"
    )


class _Order(NamedTuple):
    """Patches of one image in the order of a tower; `source_Q` is the index of each patch in the processor's order."""

    source_Q: np.ndarray
    place_Q2: np.ndarray
    frame_Q: np.ndarray
    window_Q: np.ndarray
    feature_M: np.ndarray


def patches_of(image: Image) -> int:
    """Return the number of patches of an image."""
    return int(np.prod(image.grid))


def order_of(vision: Vision, grid: tuple[int, int, int]) -> _Order:
    """Order the patches of an image window by window, and locate the features of the processor's order in that order.

    Source: Bai et al. 2025 (Qwen2.5-VL, arXiv:2502.13923), section 2.1.1.
    """
    frames, high, wide = grid
    merge, window = vision.merge, vision.window or max(high, wide)
    row, column = np.divmod(np.arange(high // merge * (wide // merge)), wide // merge)
    across = -(-(wide // merge) // window)
    window_M = row // window * across + column // window
    order_M = np.argsort(window_M, kind="stable")
    inside = np.stack(np.divmod(np.arange(merge**2), merge), axis=-1)
    place_M42 = np.stack([row, column], axis=-1)[order_M, None] * merge + inside
    count = len(order_M)
    frame_F = np.arange(frames)
    source_FM4 = (frame_F[:, None] * count + order_M)[..., None] * merge**2 + np.arange(merge**2)
    _, window_M = np.unique(window_M[order_M], return_inverse=True)
    windows = int(window_M.max()) + 1
    return _Order(
        source_FM4.reshape(-1),
        np.tile(place_M42.reshape(-1, 2), (frames, 1)),
        np.repeat(frame_F, count * merge**2),
        np.repeat((frame_F[:, None] * windows + window_M).reshape(-1), merge**2),
        (frame_F[:, None] * count + np.argsort(order_M)).reshape(-1),
    )


def corners_of(vision: Vision, place_Q2: np.ndarray, grid: tuple[int, int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Return the four entries around each patch of the position table, and their interpolation weights.

    The table is a square that is stretched over the image.
    """
    side = max(1, round(vision.positions**0.5))
    at_Q2 = place_Q2.astype(np.float32) * np.float32(side - 1) / np.maximum(np.array(grid[1:], np.float32) - 1, 1)
    first_Q2 = np.floor(at_Q2).astype(np.int32)
    rest_Q2 = at_Q2 - first_Q2
    ends_Q22 = np.stack([first_Q2, np.minimum(first_Q2 + 1, side - 1)], axis=-1)
    share_Q22 = np.stack([1 - rest_Q2, rest_Q2], axis=-1)
    corner_Q4 = (ends_Q22[:, 0, :, None] * side + ends_Q22[:, 1, None, :]).reshape(-1, 4)
    share_Q4 = (share_Q22[:, 0, :, None] * share_Q22[:, 1, None, :]).reshape(-1, 4)
    return corner_Q4.astype(np.int32), share_Q4.astype(np.float32)


def check_placeholders(
    tokens: Sequence[int], images: Sequence[Image], vision: Vision | None, *, place: str, sampled: bool = False
) -> None:
    """Raise `Refusal` unless a prompt has one placeholder for each feature of its images, and no other placeholders.

    Args:
      place: Text that says where the prompt is from, for messages.
      sampled: True if the policy sampled some of the tokens; placeholders among sampled tokens stand for no image.
    """
    if vision is None:
        if images:
            raise Refusal(
                f"{place}: {len(images)} images, but the model reads only text; set vision=True, or remove the images"
            )
        return
    ids = np.asarray(tokens)
    covered = np.zeros(len(ids), bool)
    for image in images:
        covered[image.start : image.start + image.tokens] = True
        features = patches_of(image) // vision.merge**2
        if image.tokens != features or image.start + features > len(ids):
            raise Refusal(
                f"{place}: {image.source:.60} has {features} features, but {image.tokens} tokens from token "
                f"{image.start} of {len(ids)}; prompts with images must not be truncated"
            )
    there = ids == vision.image_token
    if (covered & ~there if sampled else covered != there).any():
        raise Refusal(
            f"{place}: {int(there.sum())} placeholders (token {vision.image_token}), but {int(covered.sum())} features "
            f"of {len(images)} images; expected one image for each placeholder in the text"
        )


class StripShape(NamedTuple):
    """Space for images: number of strips of a row, and number of patches of a strip."""

    strips: int = 1
    patches: int = 0

    @classmethod
    def of(
        cls, images_R: Iterable[Sequence[Image]], *, merge: int, least: "StripShape | None" = None, steps: int = 1
    ) -> "StripShape":
        """Return the capacity for the images of any of these rows, in few sizes, so that few programs are compiled.

        Args:
          merge: Side in patches of a feature's square.
          least: Smallest capacity to return, such as that of the previous batch.
          steps: Number of sizes between a power of two and the next.
        """
        least, rows = least or cls(), list(images_R)
        most = max((patches_of(image) for row in rows for image in row), default=0)
        if not most:
            return least
        patches = max(least.patches, merge**2 * _rounded(-(-most // merge**2), steps))
        strips = max(1 + max((strip for strip, _ in strips_of(row, patches)), default=0) for row in rows)
        return cls(max(least.strips, _rounded(strips, steps)), patches)


def _rounded(count: int, steps: int) -> int:
    """Round up to a size; there are `steps` sizes between a power of two and the next."""
    step = max(1, (1 << max(0, count - 1).bit_length()) // (2 * steps)) if steps > 1 else 1 << (count - 1).bit_length()
    return math.ceil(count / step) * step


def strips_of(images: Sequence[Image], patches: int) -> list[tuple[int, int]]:
    """Return the strip of each image and its first patch there; a new strip starts when the image exceeds `patches`."""
    places, strip, used = [], 0, 0
    for image in images:
        own = patches_of(image)
        assert own <= patches, f"{own} patches in a strip of {patches}"
        if used + own > patches:
            strip, used = strip + 1, 0
        places.append((strip, used))
        used += own
    return places


def mrope_positions(vision: Vision, images: Sequence[Image], tokens: int) -> np.ndarray:
    """Return `mrope_position_T3`: int32, time, row and column of every token of a sequence of images and text.

    Positions of text count up by one. Features of an image have the image's start plus their frame, row and column.
    The next text starts after the larger of the image's height and width. If the decoder has one position per token,
    all three are the index of the token.
    """
    mrope_position_T3 = np.repeat(np.arange(tokens, dtype=np.int32)[:, None], 3, axis=1)
    if vision.sections is None:
        return mrope_position_T3
    for image in images:
        frames, high, wide = image.grid[0], *(size // vision.merge for size in image.grid[1:])
        begin, end = mrope_position_T3[image.start, 0], image.start + frames * high * wide
        grid = np.stack(np.meshgrid(*map(np.arange, (frames, high, wide)), indexing="ij"), axis=-1)
        mrope_position_T3[image.start : end] = begin + grid.reshape(-1, 3)
        mrope_position_T3[end:] = (begin + max(high, wide) + np.arange(tokens - end, dtype=np.int32))[:, None]
    return mrope_position_T3


def rows_of_prompts(
    vision: Vision,
    images_P: Sequence[Sequence[Image]],
    length_P: np.ndarray,
    width: int,
    pixels: Pixels,
    *,
    known: int = 0,
) -> ImageRows | None:
    """Return the images of left-aligned prompts, one prompt per row; None if no prompt has images.

    Args:
      known: Number of leading tokens of every prompt that are not computed; their images count only for positions.
    """
    if not any(images_P):
        return None
    shape = len(images_P), width
    shown_P = [unknown(images, known) for images in images_P]
    layout = RowLayout(
        vision, shown_P, StripShape.of(shown_P, merge=vision.merge, least=StripShape(1, vision.merge**2))
    )
    feature_PS, block_PS = np.full(shape, -1, np.int32), np.zeros(shape, np.int32)
    mrope_position_PS3 = np.zeros((*shape, 3), np.int32)
    for row, (images, length) in enumerate(zip(images_P, length_P.tolist(), strict=True)):
        feature_PS[row, :length], block_PS[row, :length] = layout.tokens(row, shown_P[row], length)
        mrope_position_PS3[row, :length] = mrope_positions(vision, images, length)
    return layout.rows(range(len(images_P)), pixels, feature_PS, block_PS, mrope_position_PS3)


def unknown(images: Sequence[Image], known: int) -> list[Image]:
    """Return the images of a prompt that are not completely among its first `known` tokens."""
    return [image for image in images if image.start + image.tokens > known]


class RowLayout:
    """Places of the images of each row in its strips; an image that sequences of a row share is stored once."""

    def __init__(self, vision: Vision, images: Sequence[Sequence[Image]], capacity: StripShape) -> None:
        self._vision, self._capacity = vision, capacity
        self._rows: list[dict[str, tuple[Image, int, int]]] = []
        for row in images:
            own = list({image.digest: image for image in row}.values())
            places = strips_of(own, capacity.patches)
            assert all(strip < capacity.strips for strip, _ in places), (
                f"{len(own)} images in a row of {capacity.strips} strips"
            )
            self._rows.append({image.digest: (image, *place) for image, place in zip(own, places, strict=True)})

    def tokens(self, row: int, images: Sequence[Image], tokens: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the feature index and the image number of each token of a sequence in a row; -1 and 0 for text."""
        feature_T, block_T = np.full(tokens, -1, np.int32), np.zeros(tokens, np.int32)
        for number, image in enumerate(images, 1):
            _, strip, first = self._rows[row][image.digest]
            feature_M = order_of(self._vision, image.grid).feature_M
            part = slice(image.start, image.start + len(feature_M))
            feature_T[part] = (strip * self._capacity.patches + first) // self._vision.merge**2 + feature_M
            block_T[part] = number
        return feature_T, block_T

    def rows(
        self, rows: range, pixels: Pixels, feature_RW: Array, block_RW: Array, mrope_position_RW3: Array
    ) -> ImageRows:
        """Build the arrays of some rows, from the features, image numbers and positions of their tokens."""
        vision, shape = self._vision, (len(rows), *self._capacity)
        pixel_RJQC = np.zeros((*shape, vision.patch_values), np.float32)
        place_RJQ2, (segment_RJQ, window_RJQ) = np.zeros((*shape, 2), np.int32), np.zeros((2, *shape), np.int32)
        corner_RJQ4, share_RJQ4 = np.zeros((*shape, 4), np.int32), np.zeros((*shape, 4), np.float32)
        for row, number in enumerate(rows):
            for image, strip, first in self._rows[number].values():
                order = order_of(vision, image.grid)
                part = row, strip, slice(first, first + len(order.source_Q))
                before = row, strip, slice(0, first)
                pixel_RJQC[part] = pixels(image)[order.source_Q]
                place_RJQ2[part] = order.place_Q2
                segment_RJQ[part] = order.frame_Q + segment_RJQ[before].max(initial=0) + 1
                window_RJQ[part] = order.window_Q + window_RJQ[before].max(initial=0) + 1
                if vision.positions:
                    corner_RJQ4[part], share_RJQ4[part] = corners_of(vision, order.place_Q2, image.grid)
        return ImageRows(
            *(pixel_RJQC, place_RJQ2, segment_RJQ, window_RJQ, corner_RJQ4, share_RJQ4),
            *(feature_RW, block_RW, mrope_position_RW3),
        )
