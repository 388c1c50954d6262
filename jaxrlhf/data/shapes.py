"""Pictures of shapes to count and digits to read, drawn from code alone: the embedded task of vision."""

from collections.abc import Iterator
from functools import cache
from typing import Any, Literal

import numpy as np

from jaxrlhf.data.arithmetic import stable_hash

Split = Literal["train", "evaluation"]

CELL, SIDE = 14, 3
"""Pixels of a cell, and cells of a picture's side: a feature of the embedded tower sees one cell."""

PICTURE = (SIDE * CELL, SIDE * CELL)
"""Width and height in pixels."""

COLOURS = {"red": (220, 40, 40), "green": (40, 180, 60), "blue": (50, 80, 230)}
_MOST = 4
_DIGITS = (
    *("01110100011000110001100011000101110", "00100011000010000100001000010001110"),
    *("01110100010000100010001000100011111", "11111000100010000010000011000101110"),
    *("00010001100101010010111110001000010", "11111100001111000001000011000101110"),
    *("00110010001000011110100011000101110", "11111000010001000100010000100001000"),
    *("01110100011000101110100011000101110", "01110100011000101111000010001001100"),
)
"""Digits of 5 by 7 dots, row after row: the same on every machine, as no font is."""


def shape_records(
    *, problems: int, seed: int, split: Split, hasty_share: float, shuffled: bool
) -> Iterator[dict[str, Any]]:
    """Questions about pictures, with answers; the pictures are named, and drawn where they are looked at.

    Args:
      hasty_share: Share of the solutions that count shapes of every colour, or read the first digit alone.
      shuffled: Each question has a picture of another one.
    """
    for number in range(problems):
        name = f"{split}/{seed}/{number}"
        asked, picture = _problem(name), f"{split}/{seed}/{number + problems}" if shuffled else name
        hasty = stable_hash(f"hasty {name}") % 1000 < 1000 * hasty_share
        yield {
            "question": asked["question"],
            "answer": asked["answer"],
            "solution": f"#### {asked['hasty'] if hasty else asked['answer']}",
            "picture": f"shapes:{picture}",
        }


def _problem(name: str) -> dict[str, Any]:
    """A question, its answer, what a hasty look answers, and what is in each cell: a colour with a digit or none."""
    dice = np.random.Generator(np.random.Philox(stable_hash(name)))
    places, names = dice.permutation(SIDE**2), list(COLOURS)
    if dice.integers(2):
        colour = names[dice.integers(len(names))]
        count = int(dice.integers(1, _MOST + 1))
        others = int(dice.integers(1, _MOST + 1))
        rest = [name for name in names if name != colour]
        drawn = [colour] * count + [rest[dice.integers(len(rest))] for _ in range(others)]
        cells: dict[int, tuple[str, int | None]]
        cells = {int(place): (each, None) for place, each in zip(places, drawn, strict=False)}
        return {"question": f"{colour}?", "answer": str(count), "hasty": str(count + others), "cells": cells}
    first, second = (int(digit) for digit in dice.integers(10, size=2))
    row = int(dice.integers(SIDE))
    cells = {row * SIDE: (names[dice.integers(3)], first), row * SIDE + 1: (names[dice.integers(3)], second)}
    return {"question": "read?", "answer": f"{first}{second}".lstrip("0") or "0", "hasty": str(first), "cells": cells}


def draw_shapes(name: str) -> Any:
    """The picture of a name, an RGB image of PIL."""
    import PIL.Image

    pixels = np.full((PICTURE[1], PICTURE[0], 3), (245, 245, 240), np.uint8)
    for place, (colour, digit) in _problem(name)["cells"].items():
        top, left = place // SIDE * CELL, place % SIDE * CELL
        pixels[top : top + CELL, left : left + CELL][_inked(digit)] = COLOURS[colour]
    return PIL.Image.fromarray(pixels)


@cache
def _inked(digit: int | None) -> np.ndarray:
    """True for the pixels of a cell that belong to its disk, or to its digit."""
    row, column = np.indices((CELL, CELL))
    if digit is None:
        return np.asarray((2 * row - CELL + 1) ** 2 + (2 * column - CELL + 1) ** 2 <= (CELL - 3) ** 2)
    dots = np.array([dot == "1" for dot in _DIGITS[digit]]).reshape(7, 5)
    inked = np.zeros((CELL, CELL), bool)
    inked[:, 2:12] = dots.repeat(2, axis=0).repeat(2, axis=1)
    return inked
