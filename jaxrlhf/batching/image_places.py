"""Positions of a batch's images in the packed rows of their tokens; each image is stored once per row."""

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from jaxrlhf.batch import Image
from jaxrlhf.models.config import Vision
from jaxrlhf.models.vision.rows import ImageRows, Pixels, RowLayout, StripShape, mrope_positions

Pack = Callable[[np.ndarray], np.ndarray]
"""Function from a `[tokens, ...]` array to `[microbatches, R, W, ...]`."""

_SIZES = 8
"""Number of capacities between powers of two; a capacity only grows during a run."""


class ImagePlaces:
    """Images of the packed rows of a batch.

    Args:
      images_B: Images of each sequence; None if this process has none.
      row_B: Packed row of each sequence, below `rows`.
      capacity: Capacity of a row in all earlier batches; increased in place if this batch needs more.
      agree: Elementwise maximum over processes.

    Attributes:
      any: True if any process has images.
    """

    def __init__(
        self,
        vision: Vision,
        images_B: np.ndarray | None,
        row_B: np.ndarray,
        *,
        rows: int,
        capacity: list[StripShape],
        agree: Callable[[np.ndarray], np.ndarray],
    ) -> None:
        self._vision, self._row_B = vision, row_B
        self._images_B: list[tuple[Image, ...]] = [()] * len(row_B) if images_B is None else images_B.tolist()
        of_row: list[dict[str, Image]] = [{} for _ in range(rows)]
        for row, images in zip(row_B.tolist(), self._images_B, strict=True):
            of_row[row] |= {image.digest: image for image in images}
        images_R = [[*images.values()] for images in of_row]
        self.any = bool(agree(np.array(any(images_R), np.int64)))
        before, capacity_of = (
            capacity[0] if capacity else None,
            partial(StripShape.of, images_R, merge=vision.merge, steps=_SIZES),
        )
        patches = int(agree(np.array(capacity_of(least=before).patches)))
        strips = int(agree(np.array(capacity_of(least=StripShape(before.strips if before else 1, patches)).strips)))
        capacity[:] = [StripShape(strips, patches)]
        self._layout = RowLayout(vision, images_R, capacity[0])

    def rows(self, length_B: np.ndarray, pack: Pack, pixels: Pixels, *, each: int) -> Iterator[ImageRows]:
        """Yield the images of each microbatch.

        Args:
          each: Number of packed rows of a microbatch.
        """
        whole = [*zip(self._row_B.tolist(), self._images_B, length_B.tolist(), strict=True)]
        tokens = [self._layout.tokens(row, images, length) for row, images, length in whole]
        feature, block = (np.concatenate(parts).astype(np.int32) for parts in zip(*tokens, strict=True))
        position = np.concatenate([mrope_positions(self._vision, images, length) for _, images, length in whole])
        tables = pack(feature + 1) - 1, pack(block), pack(position.astype(np.int32))  # -1 in padding
        for index, own in enumerate(zip(*tables, strict=True)):
            yield self._layout.rows(range(index * each, (index + 1) * each), pixels, *own)
