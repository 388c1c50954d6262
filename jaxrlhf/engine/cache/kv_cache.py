"""KV cache of all slots: one capacity for all of them (`SlotCache`), or pages for the tokens of each (`PageCache`)."""

from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import numpy as np

from jaxrlhf.engine.buckets import cache_capacities, fit, whole
from jaxrlhf.engine.cache import cache_programs
from jaxrlhf.engine.cache.block_manager import BlockManager
from jaxrlhf.engine.compiled import Compiled, EngineShardings
from jaxrlhf.engine.programs import Insertion, Prefilled
from jaxrlhf.engine.scheduler import Placement
from jaxrlhf.engine.slot_book import rows_of
from jaxrlhf.models import LayerCache, Prefix
from jaxrlhf.models.attention.kv_cache import cache_kind, capacity_of, is_ring
from jaxrlhf.models.attention.linear_attention import LayerState
from jaxrlhf.models.attention.pages import NO_PAGE, PAGE_TOKENS, PagedCache

_SIXTEENTHS = (2, 3, 4, 6, 8, 12, 16)
"""Sizes of the paged cache, in sixteenths of the pages that longest sequences in all slots need. At most a third of the
pages is unused."""


class SlotCache:
    """KV cache with one row for each row of the device's arrays; all rows have one capacity, which grows on demand.

    Layers are resized one by one, so that only one layer exists twice at a time.

    Attributes:
      arrays: Cached layers, an argument and a result of `decode`; empty while nothing is cached.
      size: Current capacity of each row, in tokens; 0 without a cache.
      sizes: Possible capacities of each row, in tokens, ascending.
    """

    def __init__(self, compiled: Compiled, layout: EngineShardings, *, slots: int, longest: int) -> None:
        self._compiled = compiled
        self._shardings, self._prefix = layout, layout.prompts.prefix
        layers = jax.eval_shape(
            partial(cache_programs.empty_cache, slots=slots, capacity=longest, shape=compiled.shape)
        )
        # Rings do not grow.
        sizes = cache_capacities(longest) if capacity_of(layers) is not None else (longest,)
        self.sizes = whole(sizes, multiple=compiled.shape.execution.cache_ways)
        self.free()

    @property
    def layout(self) -> Any:
        """Shardings of `arrays`."""
        return self._shardings.of_slots(self.arrays)

    def free(self) -> None:
        """Free the whole cache."""
        self.arrays: list[LayerCache | LayerState] = []
        self._rows = self.size = 0

    def sizes_for(self, tokens: int) -> tuple[int, ...]:
        """Return the sizes that hold a sequence of this number of tokens."""
        return tuple(size for size in self.sizes if size >= tokens)

    def grow(self, size: int) -> None:
        """Grow to at least `size`, one of `sizes`; step by step, so that each step is compiled once."""
        if not self.arrays:
            empty = partial(cache_programs.empty_cache, slots=self._rows, capacity=self.sizes[0])
            out = self._shardings.of_slots(jax.eval_shape(partial(empty, shape=self._compiled.shape)))
            self.arrays = self._compiled.run(("empty cache", self._rows), empty, out=out)
            self.size = self.sizes[0]
        while self.size < size:
            self._resize(self._rows, self.sizes[self.sizes.index(self.size) + 1], None)

    def hold(self, tokens_B: np.ndarray, slot_B: np.ndarray) -> None:
        """Ensure room for the tokens of each slot.

        Args:
          tokens_B: Number of tokens of each slot, indexed by slot.
          slot_B: Slot of each row of the device's arrays.
        """
        self.grow(fit(int(tokens_B[slot_B].max()), self.sizes))

    def place(self, prefilled: Prefilled, placements: Sequence[Placement], insertion: Insertion) -> None:
        """Copy the prompt of each placement into the row of its slot, as the insertion says."""
        _, prompt_rows, width, *_ = prefilled.prompts.prefix.key_LPSKH.shape
        self.grow(fit(width, self.sizes))
        prompts: Any = prefilled.prompts
        prompts = prompts._replace(hidden_PD=None, choice_PSLk=None, offset_P=None)
        places: Counter[str] = Counter()
        for layer, stored in enumerate(self.arrays):
            sizes = (_named("place", stored), width, self.size, prompt_rows, self._rows)
            place = np.int32(places[cache_kind(stored)])
            arguments = (stored, prompts, place, insertion.row_I, insertion.target_I)
            out = self._shardings.of_slots(stored)
            self.arrays[layer] = self._compiled.run(sizes, cache_programs.place, *arguments, out=out, donate=0)
            places[cache_kind(stored)] += 1

    def prefix(self, slots: Sequence[int], slot_B: np.ndarray, *, width: int) -> Prefix:
        """Return the first `width` entries of these slots in the form of a prefill's result."""
        rows, sizes = rows_of(slots, slot_B), ("take", width, self.size, len(slots), self._rows)
        program = partial(cache_programs.take_prefix, width=width)
        return self._compiled.run(sizes, program, self.arrays, rows, out=self._prefix)

    def keep(self, row_GB: np.ndarray) -> None:
        """Gather these rows of each replica."""
        self._resize(row_GB.size, self.size, row_GB)

    def _resize(self, rows: int, capacity: int, row_GB: np.ndarray | None) -> None:
        program, before = partial(cache_programs.resize, capacity=capacity), self.size
        for layer, stored in enumerate(self.arrays):
            if row_GB is None and is_ring(stored):
                continue
            sizes = (_named("resize", stored), self._rows, before, rows, capacity)
            out = self._shardings.of_slots(stored)
            self.arrays[layer] = self._compiled.run(sizes, program, stored, row_GB, out=out)
        self._rows, self.size = rows, capacity


def _named(what: str, stored: LayerCache | LayerState) -> str:
    """Return the name of a program for a layer of this kind."""
    ring = " ring" if is_ring(stored) else ""
    return what + {"state": " state", "sliding": " sliding"}.get(cache_kind(stored), "") + ring


class PageCache:
    """KV cache in pages, an alternative to `SlotCache`.

    Each replica has its own pages; all replicas have as many pages as the fullest one needs. Memory is proportional to
    the sum of the lengths; `SlotCache` gives every slot the longest length. A response that ends frees its pages for
    others, and responses to one prompt share the pages that the prompt fills.

    Args:
      longest_prompt: Number of tokens of the longest prompt that the responses of a group share.
      prompts: Number of distinct prompts of a batch.

    Attributes:
      arrays: Pages of each layer and the page table, an argument and a result of `decode`; no layers while nothing is
        cached.
      size: Number of pages of a replica; 0 without a cache.
      sizes: Possible numbers of pages of a replica, ascending; one of them holds the longest responses to the prompts.
    """

    def __init__(
        self,
        compiled: Compiled,
        layout: EngineShardings,
        *,
        slots: int,
        longest: int,
        longest_prompt: int,
        prompts: int,
    ) -> None:
        self._compiled, self._slots, self._replicas = compiled, slots, (replicas := compiled.shape.replicas)
        self._columns = -(-longest // PAGE_TOKENS)
        own_slots = slots // replicas
        most = own_slots * self._columns
        # A response may start anywhere in its first page.
        shared, own = longest_prompt // PAGE_TOKENS, -(-(longest - longest_prompt) // PAGE_TOKENS) + 1
        together = min(own_slots, -(-prompts // replicas)) * shared + own_slots * own
        self._expected = min(together, most)
        self.sizes = tuple(sorted({-(-most * part // 16) for part in _SIXTEENTHS} | {self._expected}))
        self.layout, self._prefix = layout.pages, layout.prompts.prefix
        self.free()

    def free(self) -> None:
        """Free the whole cache."""
        self.arrays = PagedCache([], np.zeros((0, self._columns), np.int32))
        self.books = [
            BlockManager(slots=self._slots // self._replicas, page_tokens=PAGE_TOKENS) for _ in range(self._replicas)
        ]
        self.size = 0

    def sizes_for(self, tokens: int) -> tuple[int, ...]:
        """Return the sizes that hold a sequence of this number of tokens, up to the expected size."""
        return tuple(size for size in self.sizes if tokens <= size * PAGE_TOKENS and size <= self._expected)

    def grow(self, size: int) -> None:
        """Grow to at least `size`, one of `sizes`; step by step, so that each step is compiled once."""
        layers, where = self.arrays.layers, self.layout.layers
        if not layers:
            self.size = self.sizes[0]
            empty = partial(cache_programs.empty_pages, pages=self._replicas * self.size)
            layers.extend(self._compiled.run(("empty pages",), empty, out=where))
        while self.size < size:
            larger = self.sizes[self.sizes.index(self.size) + 1]
            program = partial(cache_programs.add_pages, pages=larger - self.size)
            for layer, pages in enumerate(layers):
                layers[layer] = self._compiled.run(("add pages", self.size), program, pages, out=where)
            self.size = larger

    def hold(self, tokens_B: np.ndarray, slot_B: np.ndarray) -> None:
        """Ensure room for the tokens of each slot, as `SlotCache.hold`; a slot with 0 tokens frees its pages."""
        for slot, tokens in enumerate(tokens_B.tolist()):
            replica, own = self._place_of(slot)
            self.books[replica].hold(own, tokens)
        self._grow_to_fit()
        table_BQ = np.full((len(slot_B), self._columns), NO_PAGE, np.int32)
        for row, slot in enumerate(slot_B.tolist()):
            replica, own = self._place_of(slot)
            pages = self.books[replica].held(own)
            table_BQ[row, : len(pages)] = pages
        self.arrays = PagedCache(self.arrays.layers, self._compiled.put(table_BQ, self.layout.table_BQ))

    def place(self, prefilled: Prefilled, placements: Sequence[Placement], insertion: Insertion) -> None:
        """Copy the prompt of each placement into pages of its slot, as `SlotCache.place`."""
        _, rows, width, *_ = prefilled.prompts.prefix.key_LPSKH.shape
        page_GIQ = np.full((self._replicas, len(insertion.row_I), -(-width // PAGE_TOKENS)), NO_PAGE, np.int32)
        for index, (row, slot, _) in enumerate(placements):
            replica, own = self._place_of(slot)
            pages = self.books[replica].place(own, prefilled.tokens[row])
            page_GIQ[replica, index, : len(pages)] = pages
        self._grow_to_fit()
        layers, sizes, program = self.arrays.layers, ("place", width, self.size, rows), cache_programs.place_in_pages
        for layer, stored in enumerate(layers):
            arguments = (stored, prefilled.prompts.prefix, np.int32(layer), insertion.row_I, page_GIQ)
            layers[layer] = self._compiled.run(sizes, program, *arguments, out=self.layout.layers, donate=0)

    def prefix(self, slots: Sequence[int], slot_B: np.ndarray, *, width: int) -> Prefix:
        """Return the first `width` entries of these slots in the form of a prefill's result."""
        page_GPQ = np.full((self._replicas, len(slots), -(-width // PAGE_TOKENS)), NO_PAGE, np.int32)
        for row, slot in enumerate(slots):
            replica, own = self._place_of(slot)
            pages = self.books[replica].held(own)[: page_GPQ.shape[2]]
            page_GPQ[replica, row, : len(pages)] = pages
        program = partial(cache_programs.take_prefix_from_pages, width=width)
        sizes = ("take", width, self.size, len(slots))
        return self._compiled.run(sizes, program, self.arrays.layers, page_GPQ, out=self._prefix)

    def keep(self, row_GB: np.ndarray) -> None:
        """Gather these rows of each replica; nothing to do, as pages do not move."""

    def _place_of(self, slot: int) -> tuple[int, int]:
        """Return the replica of a slot, and the slot's index in the replica."""
        return divmod(slot, self._slots // self._replicas)

    def _grow_to_fit(self) -> None:
        self.grow(fit(max(book.numbered for book in self.books), self.sizes))


def cache_of(
    compiled: Compiled, layout: EngineShardings, *, slots: int, longest: int, longest_prompt: int, prompts: int
) -> SlotCache | PageCache:
    """Return the paged or slot cache that the execution requires. The arguments are those of `PageCache`."""
    if compiled.shape.execution.pages_kernel is None:
        return SlotCache(compiled, layout, slots=slots, longest=longest)
    return PageCache(compiled, layout, slots=slots, longest=longest, longest_prompt=longest_prompt, prompts=prompts)
