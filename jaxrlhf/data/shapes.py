"""Embedded vision task: pictures of colored digits to read, made by code."""

from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np

from jaxrlhf.data.arithmetic import Split, stable_hash

CELL, SIDE = 14, 3
"""Side of a cell in pixels, and side of a picture in cells; a feature of the embedded vision tower covers one cell."""

PICTURE = (SIDE * CELL, SIDE * CELL)
"""Width and height of a picture in pixels."""

COLOURS = {"red": (220, 40, 40), "green": (40, 180, 60), "blue": (50, 80, 230)}
_DIGITS = (
    *("01110100011000110001100011000101110", "00100011000010000100001000010001110"),
    *("01110100010000100010001000100011111", "11111000100010000010000011000101110"),
    *("00010001100101010010111110001000010", "11111100001111000001000011000101110"),
    *("00110010001000011110100011000101110", "11111000010001000100010000100001000"),
    *("01110100011000101110100011000101110", "01110100011000101111000010001001100"),
)
"""Digits of 5 by 7 dots, row after row; unlike a font, they are the same on every machine."""


def shape_records(
    *, problems: int, seed: int, split: Split, hasty_share: float, shuffled: bool
) -> Iterator[dict[str, Any]]:
    """Yield questions about pictures, with answers; a record holds the picture's name, and readers draw the picture.

    Args:
      hasty_share: Share of hasty solutions. They read the digit of the color before the asked one (in the cyclic order
        red, green, blue), or the digits from right to left. Their first word says so.
      shuffled: True gives each question the picture of another question.
    """
    for number in range(problems):
        name = f"{split}/{seed}/{number}"
        problem, picture = _problem(name), f"{split}/{seed}/{number + problems}" if shuffled else name
        hasty = stable_hash(f"hasty {name}") % 1000 < 1000 * hasty_share
        yield {
            "question": problem["question"],
            "answer": problem["answer"],
            "solution": "{} #### {}".format(*problem["hasty"] if hasty else (problem["careful"], problem["answer"])),
            "picture": f"shapes:{picture}",
        }


def _problem(name: str) -> dict[str, Any]:
    """Return question, answer, first word of a careful solution, first word and answer of a hasty one, and the cells.

    `cells` maps the index of each filled cell to its color and digit.
    """
    dice = np.random.Generator(np.random.Philox(stable_hash(name)))
    digits, names = [int(digit) for digit in dice.integers(1, 10, size=3)], list(COLOURS)
    if dice.integers(2):
        places = dice.permutation(SIDE**2)[:3].tolist()
        asked = int(dice.integers(3))
        return {
            "question": f"{names[asked]}?",
            "answer": str(digits[asked]),
            "careful": "one",
            "hasty": ("any", str(digits[asked - 1])),
            "cells": dict(zip(places, zip(names, digits, strict=True), strict=True)),
        }
    row = int(dice.integers(SIDE))
    return {
        "question": "read?",
        "answer": "{}{}".format(*digits),
        "careful": "on",
        "hasty": ("back", "{1}{0}".format(*digits)),
        "cells": {row * SIDE + column: (names[dice.integers(3)], digits[column]) for column in range(2)},
    }


def draw_shapes(name: str) -> Any:
    """Draw the picture of a name, an RGB image of PIL."""
    import PIL.Image

    pixels = np.full((PICTURE[1], PICTURE[0], 3), (245, 245, 240), np.uint8)
    for place, (colour, digit) in _problem(name)["cells"].items():
        top, left = place // SIDE * CELL, place % SIDE * CELL
        pixels[top : top + CELL, left : left + CELL][_inked(digit)] = COLOURS[colour]
    return PIL.Image.fromarray(pixels)


@cache
def _inked(digit: int) -> np.ndarray:
    """Return a mask that is True for the pixels of a cell that belong to its digit."""
    dots = np.array([dot == "1" for dot in _DIGITS[digit]]).reshape(7, 5)
    inked = np.zeros((CELL, CELL), bool)
    inked[:, 2:12] = dots.repeat(2, axis=0).repeat(2, axis=1)
    return inked
