"""The key-value cache of all slots: each slot as long as the longest response needs, or pages for its own tokens."""

from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import numpy as np

from jaxrlhf.batch import Array
from jaxrlhf.engine import programs
from jaxrlhf.engine.buckets import cache_capacities, fit, whole
from jaxrlhf.engine.cache.block_manager import BlockManager
from jaxrlhf.engine.compiled import Compiled, EngineShardings
from jaxrlhf.engine.programs import Prefilled
from jaxrlhf.models import LayerCache, Prefix
from jaxrlhf.models.attention.kv_cache import capacity_of, is_ring, keeps_of
from jaxrlhf.models.attention.linear_attention import LayerState
from jaxrlhf.models.attention.pages import NO_PAGE, PAGE_TOKENS, PagedCache

_SIXTEENTHS = (2, 3, 4, 6, 8, 12, 16)
"""Sizes of the cache, as shares of the pages for longest sequences in all slots: at most a third is unused."""


class SlotCache:
    """A cache that grows with what it holds. Layers change one after another, so that little exists twice.

    Attributes:
      arrays: What `decode` takes, and gives back; empty as long as nothing is cached.
      size: Tokens of each slot; 0 without a cache.
      sizes: Tokens of each slot that it may have, ascending.
    """

    def __init__(self, compiled: Compiled, layout: EngineShardings, *, slots: int, longest: int) -> None:
        self._compiled, self._slots = compiled, slots
        self._shardings, self._prefix = layout, layout.prompts.prefix
        layers = jax.eval_shape(partial(programs.empty_cache, slots=slots, capacity=longest, shape=compiled.shape))
        # Rings do not grow.
        sizes = cache_capacities(longest) if capacity_of(layers) is not None else (longest,)
        self.sizes = whole(sizes, multiple=compiled.shape.execution.cache_ways)
        self.free()

    @property
    def layout(self) -> Any:
        """Shardings of `arrays`."""
        return self._shardings.of_slots(self.arrays)

    def free(self) -> None:
        """Drop everything."""
        self.arrays: list[LayerCache | LayerState] = []
        self._rows, self.size = self._slots, 0

    def sizes_for(self, tokens: int) -> tuple[int, ...]:
        """Sizes that hold a sequence of so many tokens."""
        return tuple(size for size in self.sizes if size >= tokens)

    def grow(self, size: int) -> None:
        """Be one of `sizes`, at least: step by step, so that every step is compiled once."""
        if not self.arrays:
            empty = partial(programs.empty_cache, slots=self._rows, capacity=self.sizes[0])
            out = self._shardings.of_slots(jax.eval_shape(partial(empty, shape=self._compiled.shape)))
            self.arrays = self._compiled.run(("empty cache",), empty, out=out)
            self.size = self.sizes[0]
        while self.size < size:
            self._resize(self._rows, self.sizes[self.sizes.index(self.size) + 1], None)

    def hold(self, tokens_B: np.ndarray, slot_B: np.ndarray) -> None:
        """Have room for so many tokens in each slot.

        Args:
          tokens_B: By slot.
          slot_B: The slots that are computed, in the order of their rows.
        """
        self.grow(fit(int(tokens_B[slot_B].max()), self.sizes))

    def place(self, prefilled: Prefilled, row_I: Array, slot_I: Array) -> None:
        """Copy prompt `row_I[i]` into slot `slot_I[i]`, for each i; a slot past the last is skipped."""
        _, rows, width, *_ = prefilled.prompts.prefix.key_LPSKH.shape
        self.grow(fit(width, self.sizes))
        prompts: Any = prefilled.prompts
        prompts = prompts._replace(hidden_PD=None, choice_PSLk=None, offset_P=None)
        places: Counter[str] = Counter()
        for layer, stored in enumerate(self.arrays):
            sizes, place = (_named("place", stored), width, self.size, rows), np.int32(places[keeps_of(stored)])
            arguments = (stored, prompts, place, row_I, slot_I)
            out = self._shardings.of_slots(stored)
            self.arrays[layer] = self._compiled.run(sizes, programs.place, *arguments, out=out, donate=0)
            places[keeps_of(stored)] += 1

    def prefix(self, slots: Sequence[int], *, width: int) -> Prefix:
        """The first `width` entries of these slots, all of which are computed, as a prefill leaves them."""
        rows, sizes = np.asarray(slots, np.int32), ("take", width, self.size, len(slots))
        program = partial(programs.take_prefix, width=width)
        return self._compiled.run(sizes, program, self.arrays, rows, out=self._prefix)

    def keep(self, row_GB: np.ndarray) -> None:
        """Only these rows of each replica go on."""
        self._resize(row_GB.size, self.size, row_GB)

    def _resize(self, rows: int, capacity: int, row_GB: np.ndarray | None) -> None:
        program, before = partial(programs.resize, capacity=capacity), self.size
        for layer, stored in enumerate(self.arrays):
            if row_GB is None and is_ring(stored):
                continue
            sizes = (_named("resize", stored), self._rows, before, rows, capacity)
            out = self._shardings.of_slots(stored)
            self.arrays[layer] = self._compiled.run(sizes, program, stored, row_GB, out=out)
        self._rows, self.size = rows, capacity


def _named(what: str, stored: LayerCache | LayerState) -> str:
    """Name of a program for a layer of this kind."""
    ring = " ring" if is_ring(stored) else ""
    return what + {"state": " state", "sliding": " sliding"}.get(keeps_of(stored), "") + ring


class PageCache:
    """A cache in pages, in place of `SlotCache`. Each replica has its own; all have as many as the fullest one needs.

    Memory follows the sum of the lengths, where slots of one capacity take the longest for each. A response that
    ends gives its pages to others, and responses to one prompt share those that it fills.

    Args:
      longest_prompt: Tokens of the longest prompt that the responses of a group share.
      prompts: Distinct prompts that come at a time.

    Attributes:
      arrays: What `decode` takes, and gives back; no layers as long as nothing is cached.
      size: Pages of a replica; 0 without a cache.
      sizes: Numbers of pages that it may have, ascending; one of them holds the longest responses to the prompts.
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
        # A response begins anywhere in its first page.
        shared, own = longest_prompt // PAGE_TOKENS, -(-(longest - longest_prompt) // PAGE_TOKENS) + 1
        together = min(own_slots, -(-prompts // replicas)) * shared + own_slots * own
        self._expected = min(together, most)
        self.sizes = tuple(sorted({-(-most * part // 16) for part in _SIXTEENTHS} | {self._expected}))
        self.layout, self._prefix = layout.pages, layout.prompts.prefix
        self.free()

    def free(self) -> None:
        """Drop everything."""
        self.arrays = PagedCache([], np.zeros((0, self._columns), np.int32))
        self.books = [
            BlockManager(slots=self._slots // self._replicas, page_tokens=PAGE_TOKENS) for _ in range(self._replicas)
        ]
        self.size = 0

    def sizes_for(self, tokens: int) -> tuple[int, ...]:
        """Sizes that hold a sequence of so many tokens, up to the expected one."""
        return tuple(size for size in self.sizes if tokens <= size * PAGE_TOKENS and size <= self._expected)

    def grow(self, size: int) -> None:
        """Be one of `sizes`, at least: step by step, so that every step is compiled once."""
        layers, where = self.arrays.layers, self.layout.layers
        if not layers:
            self.size = self.sizes[0]
            empty = partial(programs.empty_pages, pages=self._replicas * self.size)
            layers.extend(self._compiled.run(("empty pages",), empty, out=where))
        while self.size < size:
            larger = self.sizes[self.sizes.index(self.size) + 1]
            program = partial(programs.add_pages, pages=larger - self.size)
            for layer, pages in enumerate(layers):
                layers[layer] = self._compiled.run(("add pages", self.size), program, pages, out=where)
            self.size = larger

    def hold(self, tokens_B: np.ndarray, slot_B: np.ndarray) -> None:
        """Have room for so many tokens in each slot, as `SlotCache.hold`; a slot of none gives its pages back."""
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

    def place(self, prefilled: Prefilled, row_I: Array, slot_I: Array) -> None:
        """Copy prompt `row_I[i]` into slot `slot_I[i]`, for each i; a slot past the last is skipped."""
        _, rows, width, *_ = prefilled.prompts.prefix.key_LPSKH.shape
        page_GIQ = np.full((self._replicas, len(row_I), -(-width // PAGE_TOKENS)), NO_PAGE, np.int32)
        for index, (row, slot) in enumerate(zip(row_I.tolist(), slot_I.tolist(), strict=True)):
            if slot < self._slots:
                replica, own = self._place_of(slot)
                pages = self.books[replica].place(own, prefilled.tokens[row])
                page_GIQ[replica, index, : len(pages)] = pages
        self._grow_to_fit()
        layers, sizes, program = self.arrays.layers, ("place", width, self.size, rows), programs.place_in_pages
        for layer, stored in enumerate(layers):
            arguments = (stored, prefilled.prompts.prefix, np.int32(layer), row_I, page_GIQ)
            layers[layer] = self._compiled.run(sizes, program, *arguments, out=self.layout.layers, donate=0)

    def prefix(self, slots: Sequence[int], *, width: int) -> Prefix:
        """The first `width` entries of these slots, as a prefill leaves them."""
        page_GPQ = np.full((self._replicas, len(slots), -(-width // PAGE_TOKENS)), NO_PAGE, np.int32)
        for row, slot in enumerate(slots):
            replica, own = self._place_of(slot)
            pages = self.books[replica].held(own)[: page_GPQ.shape[2]]
            page_GPQ[replica, row, : len(pages)] = pages
        program = partial(programs.take_prefix_from_pages, width=width)
        sizes = ("take", width, self.size, len(slots))
        return self._compiled.run(sizes, program, self.arrays.layers, page_GPQ, out=self._prefix)

    def keep(self, row_GB: np.ndarray) -> None:
        """Only these rows of each replica go on: their pages stay where they are."""

    def _place_of(self, slot: int) -> tuple[int, int]:
        """The replica that has a slot, and which of its slots it is."""
        return divmod(slot, self._slots // self._replicas)

    def _grow_to_fit(self) -> None:
        self.grow(fit(max(book.numbered for book in self.books), self.sizes))


def cache_of(
    compiled: Compiled, layout: EngineShardings, *, slots: int, longest: int, longest_prompt: int, prompts: int
) -> SlotCache | PageCache:
    """The cache of a model and its execution. Arguments are those of `PageCache`."""
    if compiled.shape.execution.pages_kernel is None:
        return SlotCache(compiled, layout, slots=slots, longest=longest)
    return PageCache(compiled, layout, slots=slots, longest=longest, longest_prompt=longest_prompt, prompts=prompts)
