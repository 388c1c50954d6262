"""Prefill: batches of prompts, padded to few lengths, that start from their cached prefixes."""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from jaxrlhf.batch import images_of, tokens_of
from jaxrlhf.engine import programs
from jaxrlhf.engine.buckets import busy_buckets, fit, halving_buckets, length_buckets, whole
from jaxrlhf.engine.cache.contents import PrefixCache
from jaxrlhf.engine.cache.kv_cache import PageCache, SlotCache
from jaxrlhf.engine.compiled import Compiled, EngineShardings, Size
from jaxrlhf.engine.programs import Prefilled
from jaxrlhf.engine.weights import Weights
from jaxrlhf.models import Past
from jaxrlhf.models.vision.rows import Pixels, no_pixels, rows_of_prompts, unknown

PREFILL_TOKENS = 2048
"""Target number of tokens of one prefill, padding included; a longer prompt is run chunk by chunk."""

CHUNK_TOKENS = 512
"""Number of tokens of a chunk of a long prompt: large enough for efficient matrix products, and small enough that
little of the last chunk is padding."""


CHUNK_PARTS = (16, 4, 1)
"""Divisors of `CHUNK_TOKENS` that give smaller chunks for fewer tokens."""

FEWER_ROWS = (2, 4, 8, 16, 32, 64, 128)
"""Divisors of the maximum rows of a prefill: a few prompts, such as one of a chat, have programs with fewer rows."""

FEWER_ROWS_PAST = (8, 64)
"""Divisors for prompts with cached prefixes, which have more programs by their chunks, and run few tokens."""

PAST_PREFILLS = 4
"""Padded tokens of a prefill with cached prefixes, as a multiple of `PREFILL_TOKENS`: few of these tokens are run."""

SHORTEST_PAST = 64
"""Shortest padded length of prompts with a cached prefix; other lengths are about its doubles. The prefix is copied and
attended to, not run."""


class Kind(NamedTuple):
    """Kind of a prompt: sizes that all prompts of one prefill have in common.

    Attributes:
      known_bits: Bit length of the number of cached prefix tokens (with rings, that number itself); 0 without a prefix.
      width: Maximum number of tokens that the prompt is padded to.
    """

    known_bits: int
    width: int


def rows_of_prefill(slots: int, *, longest_prompt: int) -> int:
    """Return the maximum rows of a prefill: a power of two; that many longest prompts fit in `PREFILL_TOKENS`."""
    return 1 << (max(1, min(slots, PREFILL_TOKENS // longest_prompt)).bit_length() - 1)


class Prefill:
    """Prefill runner for up to `rows` prompts at a time.

    Args:
      replicas: Number of parts that rows are split into.
      longest_prompt: Number of tokens of the longest prompt that programs are compiled for ahead of time.
      capacity: Number of tokens of the longest sequence; the prompt of a later turn may be as long.

    Attributes:
      buckets: Padded lengths of prompts without a cached prefix.
      past_widths: Padded lengths of prompts with a cached prefix.
      prompts, prompt_tokens: Number of prompts prefilled so far, and of their tokens.
      reused_tokens: Number of these tokens that were in the cache and not run.
      images: Number of images that the vision tower was run on.
    """

    def __init__(
        self,
        compiled: Compiled,
        layout: EngineShardings,
        *,
        rows: int,
        replicas: int,
        longest_prompt: int,
        capacity: int,
        pixels: Pixels = no_pixels,
    ) -> None:
        self._compiled, self._layout, self.rows, self._replicas = compiled, layout, rows, replicas
        multiple = compiled.shape.execution.cache_ways
        self.buckets = whole(length_buckets(longest_prompt), multiple=multiple)
        longer = whole(length_buckets(capacity), multiple=multiple)
        self._longer = tuple(size for size in longer if size > self.buckets[-1])
        self.past_widths = whole(halving_buckets(capacity, shortest=SHORTEST_PAST), multiple=multiple)
        self.prompts = self.prompt_tokens = self.reused_tokens = self.images = 0
        self._pixels = pixels

    def only_busy(self, prompt_lengths: Sequence[int]) -> list[int]:
        """Drop buckets that prompts of these lengths seldom need; return one length for each remaining bucket in use.

        Longer prompts, such as those of later turns, have their own buckets, which all stay.
        """
        prompts = [length for length in prompt_lengths if length <= self.buckets[-1]]
        self.buckets = busy_buckets(self.buckets, prompts, together=self.rows)
        kept = (*self.buckets, *self._longer)
        shortest = {fit(length, kept): length for length in sorted(prompt_lengths, reverse=True)}
        return list(shortest.values())

    def kind(self, contents: PrefixCache, prompt: tuple[int, ...]) -> Kind:
        """Return the kind of a prompt: prompts of similar length and cached prefix have one kind, and run together."""
        if known := contents.longest(prompt).tokens:
            alike = known.bit_length() if contents.ring is None else known  # all start from the shortest prefix
            return Kind(alike, fit(len(prompt), self.past_widths))
        return Kind(0, self.width(max(len(prompt), self.buckets[-1])))

    def width(self, tokens: int) -> int:
        """Return the padded length of a whole sequence without a cached prefix."""
        return fit(tokens, (*self.buckets, *self._longer))

    def most(self, kind: Kind) -> int:
        """Return the maximum number of prompts of a kind in one prefill, so that memory is bounded for any length."""
        tokens = PREFILL_TOKENS * PAST_PREFILLS if kind.known_bits else PREFILL_TOKENS
        return self._whole_replicas(1 << (max(1, tokens // kind.width).bit_length() - 1))

    def _whole_replicas(self, rows: int) -> int:
        return min(self.rows, -(-rows // self._replicas) * self._replicas)

    def run(
        self,
        prompts: Sequence[tuple[int, ...]],
        weights: Weights,
        cache: SlotCache | PageCache,
        contents: PrefixCache,
        slot_B: np.ndarray,
    ) -> Prefilled:
        """Run prompts of one kind; all of them start after the shortest cached prefix.

        Args:
          slot_B: Slot of each row of the cache.
        """
        longest, known = max(map(len, prompts)), [contents.longest(prompt) for prompt in prompts]
        begins = tuple(contents.reuse(each) for each in known)
        first = min(tokens for tokens, _ in known)
        width = fit(longest, self.past_widths) if first else self.width(longest)
        count = self.most(Kind(first.bit_length(), max(width, 0 if first else self.buckets[-1])))
        divisors = FEWER_ROWS_PAST if first else FEWER_ROWS
        fewer = (self._whole_replicas(max(1, count // divisor)) for divisor in divisors)
        count = min(rows for rows in (count, *fewer) if rows >= len(prompts))
        token_PS = np.zeros((count, width), np.int32)
        length_P = np.ones(count, np.int32)
        for row, prompt in enumerate(prompts):
            token_PS[row, : len(prompt)] = tokens_of(prompt)
            length_P[row] = len(prompt)
        self.prompts += len(prompts)
        self.prompt_tokens += sum(map(len, prompts))
        self.reused_tokens += first * len(prompts)
        rows = self._compiled.put((token_PS, length_P), self._layout.rows)
        arguments: tuple = weights.params, weights.stackless, *rows
        vision = self._compiled.shape.config.vision
        whole = width <= PREFILL_TOKENS or (vision is not None and vision.both_ways)
        chunk = None if whole else CHUNK_TOKENS
        sizes: tuple[Size, ...] = ("prefill", width, count)
        if first:
            slots = [slot for _, slot in known]
            prefix = cache.prefix(slots + slots[:1] * (count - len(prompts)), slot_B, width=width)
            chunk = min(width, _chunk_of(longest - first, rows=count))
            arguments = (*arguments, Past(prefix, np.asarray(first, np.int32)))
            sizes = ("prefill from", width, chunk, count)
        if (images := self._images(prompts, length_P, width, known=first)) is not None:
            past = arguments[4:] or (None,)
            arguments, sizes = (*arguments[:4], *past, images), (*sizes, *images.pixel_RJQC.shape[1:3], "patches")
        program = partial(programs.prefill, chunk_tokens=chunk)
        run = self._compiled.run(sizes, program, *arguments, out=self._layout.prompts)
        return Prefilled(run, tuple(prompts), weights.version, begins)

    def _images(self, prompts: Sequence[tuple[int, ...]], length_P: np.ndarray, width: int, *, known: int) -> Any:
        """Put the images of the prompts on the devices; return None without images, or for a text-only model.

        Args:
          known: Number of tokens at the start of every prompt that are not run.
        """
        vision = self._compiled.shape.config.vision
        if vision is None:
            return None
        images_P = [images_of(prompt) for prompt in prompts] + [()] * (len(length_P) - len(prompts))
        rows = rows_of_prompts(vision, images_P, length_P, width, self._pixels, known=known)
        self.images += sum(len(unknown(images, known)) for images in images_P)
        return None if rows is None else self._compiled.put(rows, self._layout.rows)


def _chunk_of(tokens: int, *, rows: int) -> int:
    """Return the smallest of at most three chunk sizes that needs at most four chunks for `tokens` tokens per prompt.

    The largest size takes as many chunks as needed.
    """
    sizes = [CHUNK_TOKENS // part for part in CHUNK_PARTS if part <= CHUNK_TOKENS]
    sizes = [size for size in sizes if size * rows <= PREFILL_TOKENS] or sizes[:1]
    return next((size for size in sizes if tokens <= 4 * size), sizes[-1])
