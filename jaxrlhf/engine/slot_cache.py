"""The keys and values of all slots: as long as the longest response needs, for as many slots as are in use."""

from functools import partial

import numpy as np

from jaxrlhf.engine import programs
from jaxrlhf.engine.compiled import Compiled
from jaxrlhf.engine.layout import Layout
from jaxrlhf.engine.lengths import fit
from jaxrlhf.engine.programs import Prompts
from jaxrlhf.models.cache import Cache
from jaxrlhf.parallel import cache_capacities


class SlotCache:
    """A cache that grows with what it holds. Layers change one after another, so that little exists twice.

    Args:
      longest: Tokens of the longest sequence.

    Attributes:
      layers: Empty as long as nothing is cached.
      capacities: That it may have.
    """

    def __init__(self, compiled: Compiled, layout: Layout, *, longest: int) -> None:
        self._compiled, self._layout = compiled, layout
        self.capacities = cache_capacities(longest)
        self.layers: Cache = []

    @property
    def capacity(self) -> int:
        """Tokens of each slot; 0 without a cache."""
        return self.layers[0].capacity if self.layers else 0

    def free(self) -> None:
        """Drop everything."""
        self.layers = []

    def hold(self, tokens: int, *, slots: int) -> None:
        """Have room for so many tokens in every slot: step by step, so that every step is compiled once."""
        wanted = fit(min(tokens, self.capacities[-1]), self.capacities)
        if not self.layers:
            empty = partial(programs.empty_cache, slots=slots, capacity=self.capacities[0])
            self.layers = self._compiled.run(("empty cache",), empty, out=self._layout.cache)
        while self.capacity < wanted:
            self._resize(slots, slots, self.capacities[self.capacities.index(self.capacity) + 1], None)

    def place(self, prompts: Prompts, row_I: np.ndarray, slot_I: np.ndarray) -> None:
        """Copy prompt `row_I[i]` into slot `slot_I[i]`, for each i."""
        sizes = ("place", prompts.prefix.key_LPSKH.shape[2], self.capacity)
        for layer, stored in enumerate(self.layers):
            arguments = (stored, prompts.prefix, np.int32(layer), row_I, slot_I)
            self.layers[layer] = self._compiled.run(sizes, programs.place, *arguments, out=self._layout.cache, donate=0)

    def keep(self, row_GB: np.ndarray, *, slots: int) -> None:
        """Keep these rows of each replica, of so many slots in all."""
        self._resize(slots, row_GB.size, self.capacity, row_GB)

    def _resize(self, slots: int, kept: int, capacity: int, row_GB: np.ndarray | None) -> None:
        sizes = ("resize", slots, self.capacity, kept, capacity)
        program = partial(programs.resize, capacity=capacity)
        for layer, stored in enumerate(self.layers):
            self.layers[layer] = self._compiled.run(sizes, program, stored, row_GB, out=self._layout.cache)
