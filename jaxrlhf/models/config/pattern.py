"""Order of a decoder's layers: stacks of like layers, and the repeating pattern of the stacks."""

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

LAYERS, DENSE_LAYERS, LINEAR_LAYERS, SLIDING_LAYERS = "layers", "dense_layers", "linear_layers", "sliding_layers"
BORROWING_LAYERS, SLIDING_BORROWING_LAYERS = "borrowing_layers", "sliding_borrowing_layers"
STACKS = LAYERS, DENSE_LAYERS, LINEAR_LAYERS, SLIDING_LAYERS, BORROWING_LAYERS, SLIDING_BORROWING_LAYERS
"""Names of the stacks of layers in the decoder's parameters."""

LENDERS = {BORROWING_LAYERS: LAYERS, SLIDING_BORROWING_LAYERS: SLIDING_LAYERS}
"""Stacks of layers that borrow keys and values, each with the stack whose last layer they borrow from."""


class Run(NamedTuple):
    """Run of consecutive layers of one stack: the stack's name, and the number of layers."""

    stack: str
    layers: int


class Pattern(NamedTuple):
    """Sequence of runs of layers, and the number of times that the sequence repeats."""

    repeats: int
    runs: tuple[Run, ...]

    def each(self, stack: str) -> int:
        """Return the number of layers of a stack in one repetition."""
        return sum(run.layers for run in self.runs if run.stack == stack)

    def stack_of(self) -> list[str]:
        """Return the name of the stack of each layer."""
        return [run.stack for run in self.runs for _ in range(run.layers)] * self.repeats


def find_pattern(stack_of: Sequence[str]) -> Pattern:
    """Return the shortest repeating pattern of layers, from the stack of each layer.

    If nothing repeats, for example because only the first layers are dense, the pattern is all layers, once.
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
