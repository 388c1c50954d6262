"""Placement of sequences in the rows of microbatches, in the smallest shape that needs no further microbatch."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from jaxrlhf.batching.attention_rows import place
from jaxrlhf.batching.microbatch import MicrobatchShape
from jaxrlhf.batching.shared_prompts import groups_of, units_of


class PlacedUnits(NamedTuple):
    """Units of sequences that go into one row together, and their places.

    Attributes:
      shape: Shape of a microbatch on one data-parallel device.
      microbatches: Number of microbatches of all processes.
      units: Indices of the sequences of each unit.
      row_U: Row of each unit, counted over the microbatches.
      offset_U: First token of each unit in its row.
    """

    shape: MicrobatchShape
    microbatches: int
    units: list[np.ndarray]
    row_U: np.ndarray
    offset_U: np.ndarray


def place_units(
    length_B: np.ndarray,
    shared_B: np.ndarray,
    prompt_id_B: np.ndarray,
    sizes: Sequence[MicrobatchShape],
    *,
    devices: int,
    together: int,
    agree: Callable[[np.ndarray], np.ndarray],
) -> PlacedUnits:
    """Place sequences in as few microbatches of the largest size as they need, then in the smallest size that does.

    Args:
      shared_B: Number of tokens that a sequence shares with the other responses to its prompt.
      sizes: Shapes that a microbatch may have, ascending.
      devices: Number of data-parallel devices of this process.
      together: Number of consecutive sequences that go into one row.
      agree: Elementwise maximum over processes; every process calls it equally often.
    """

    def placed(shape: MicrobatchShape) -> PlacedUnits:
        units = units_of(length_B, shared_B, prompt_id_B, row_tokens=shape.row_tokens, together=together)
        total_U = np.array([shared_B[unit[0]] + (length_B - shared_B)[unit].sum() for unit in units], np.int64)
        _, row_U, offset_U = place(total_U, [shape.row_tokens])
        needed = -(-(int(row_U.max(initial=-1)) + 1) // (shape.rows * devices))
        return PlacedUnits(shape, int(agree(np.array(max(1, needed)))), units, row_U, offset_U)

    found = placed(sizes[-1])
    saved = sum(int(shared_B[group[0]]) * (len(group) - 1) for group in groups_of(prompt_id_B))
    tokens = int(agree(np.array(length_B.sum() - saved)))
    for shape in sizes[:-1]:
        if found.microbatches * devices * shape.tokens >= tokens:
            smaller = placed(shape)
            if smaller.microbatches <= found.microbatches:
                return smaller._replace(microbatches=found.microbatches)
    return found
