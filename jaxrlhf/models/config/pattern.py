"""The order of a decoder's layers: stacks of like layers, and in what pattern they follow one another."""

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

LAYERS, DENSE_LAYERS, LINEAR_LAYERS, SLIDING_LAYERS = "layers", "dense_layers", "linear_layers", "sliding_layers"
BORROWING_LAYERS, SLIDING_BORROWING_LAYERS = "borrowing_layers", "sliding_borrowing_layers"
STACKS = LAYERS, DENSE_LAYERS, LINEAR_LAYERS, SLIDING_LAYERS, BORROWING_LAYERS, SLIDING_BORROWING_LAYERS
"""Names of the stacks of layers in the decoder's parameters."""

LENDERS = {BORROWING_LAYERS: LAYERS, SLIDING_BORROWING_LAYERS: SLIDING_LAYERS}
"""Stacks of layers that attend to keys and values of an earlier layer, and the stacks whose last layer that is."""


class Run(NamedTuple):
    """Name of a stack, and number of its layers that follow one another."""

    stack: str
    layers: int


class Pattern(NamedTuple):
    """Runs of layers, all of which follow one another so many times."""

    repeats: int
    runs: tuple[Run, ...]

    def each(self, stack: str) -> int:
        """Layers of a stack in one time."""
        return sum(run.layers for run in self.runs if run.stack == stack)

    def stack_of(self) -> list[str]:
        """Name of the stack of each layer."""
        return [run.stack for run in self.runs for _ in range(run.layers)] * self.repeats


def find_pattern(stack_of: Sequence[str]) -> Pattern:
    """The shortest pattern of layers that are in these stacks.

    Layers that are first of their kind, or last, repeat nothing: the pattern is then all of them.
    """
    count = len(stack_of)
    period = next(
        size
        for size in range(1, count + 1)
        if count % size == 0 and [*stack_of[:size]] * (count // size) == [*stack_of]
    )
    runs = tuple(Run(stack, len([*layers])) for stack, layers in groupby(stack_of[:period]))
    if len(runs) == 1:
        return Pattern(1, (Run(runs[0].stack, count),))
    return Pattern(count // period, runs)
