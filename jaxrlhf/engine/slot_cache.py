"""The keys and values of all slots: as long as the longest response needs, for as many slots as are in use."""

from functools import partial

import numpy as np

from jaxrlhf.engine import programs
from jaxrlhf.engine.compiled import Compiled
from jaxrlhf.engine.layout import EngineShardings
from jaxrlhf.engine.lengths import cache_capacities, fit
from jaxrlhf.engine.prefilled import Prefilled
from jaxrlhf.models import LayerCache


class SlotCache:
    """A cache that grows with what it holds. Layers change one after another, so that little exists twice.

    Args:
      longest: Tokens of the longest sequence.

    Attributes:
      arrays: What `decode` takes, and gives back; empty as long as nothing is cached.
      sizes: Tokens of each slot that it may have, ascending.
    """

    def __init__(self, compiled: Compiled, layout: EngineShardings, *, slots: int, longest: int) -> None:
        self._compiled, self._slots = compiled, slots
        self.layout = layout.cache
        self.sizes = cache_capacities(longest)
        self.free()

    @property
    def size(self) -> int:
        """Tokens of each slot; 0 without a cache."""
        return self.arrays[0].capacity if self.arrays else 0

    def most_compilations(self, *, prompts: int, counts: int) -> int:
        """Bound on programs of the cache and of decoding, for so many widths of prompts and counts of slots."""
        sizes, shrinking = len(self.sizes), counts * (counts - 1) // 2
        return 1 + sizes * (prompts + counts + shrinking) + (sizes - 1) * counts

    def free(self) -> None:
        """Drop everything."""
        self.arrays: list[LayerCache] = []
        self._rows = self._slots

    def sizes_for(self, tokens: int) -> tuple[int, ...]:
        """Sizes that hold a sequence of so many tokens."""
        return tuple(size for size in self.sizes if size >= tokens)

    def grow(self, size: int) -> None:
        """Be one of `sizes`, at least: step by step, so that every step is compiled once."""
        if not self.arrays:
            empty = partial(programs.empty_cache, slots=self._rows, capacity=self.sizes[0])
            self.arrays = self._compiled.run(("empty cache",), empty, out=self.layout)
        while self.size < size:
            self._resize(self._rows, self.sizes[self.sizes.index(self.size) + 1], None)

    def hold(self, tokens_B: np.ndarray, slot_B: np.ndarray) -> None:
        """Have room for so many tokens in each slot.

        Args:
          tokens_B: By slot.
          slot_B: The slots that are computed, in the order of their rows.
        """
        self.grow(fit(int(tokens_B[slot_B].max()), self.sizes))

    def place(self, prefilled: Prefilled, row_I: np.ndarray, slot_I: np.ndarray) -> None:
        """Copy prompt `row_I[i]` into slot `slot_I[i]`, for each i; a slot past the last is skipped."""
        width = prefilled.prompts.prefix.key_LPSKH.shape[2]
        self.grow(fit(width, self.sizes))
        sizes = ("place", width, self.size)
        for layer, stored in enumerate(self.arrays):
            arguments = (stored, prefilled.prompts.prefix, np.int32(layer), row_I, slot_I)
            self.arrays[layer] = self._compiled.run(sizes, programs.place, *arguments, out=self.layout, donate=0)

    def keep(self, row_GB: np.ndarray) -> None:
        """Only these rows of each replica go on."""
        self._resize(row_GB.size, self.size, row_GB)

    def _resize(self, rows: int, capacity: int, row_GB: np.ndarray | None) -> None:
        sizes = ("resize", self._rows, self.size, rows, capacity)
        program = partial(programs.resize, capacity=capacity)
        for layer, stored in enumerate(self.arrays):
            self.arrays[layer] = self._compiled.run(sizes, program, stored, row_GB, out=self.layout)
        self._rows = rows
