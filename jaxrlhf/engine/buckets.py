"""The sizes that programs are compiled for; of lengths few, and none much longer than what it serves."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace

from jaxrlhf.models import ONE_DEVICE, AnyModel, Execution
from jaxrlhf.models.config import ModelConfig

SHORTEST_BUCKET = 16


@dataclass(frozen=True)
class Shape:
    """Sizes that a program is compiled for, beside the lengths that vary between programs.

    Attributes:
      replicas: Parts that the slots are split into.
      most_stop_tokens: Ids that may end a response.
      tokens_per_dispatch: Most tokens that a slot draws in one `decode`.
      records_routing: Which experts tokens go through is kept.
      most_kept: K, tokens at most that a recorded draw is among; 0 records none.
    """

    config: AnyModel
    replicas: int
    most_stop_tokens: int
    tokens_per_dispatch: int
    execution: Execution = ONE_DEVICE
    records_routing: bool = False
    most_kept: int = 0

    @property
    def counts_apart(self) -> bool:
        """Return whether positions behind images are not the indices of tokens."""
        return self.config.vision is not None and self.config.vision.sections is not None


def length_buckets(longest: int) -> tuple[int, ...]:
    """Lengths that programs are compiled for: two significant bits, the last one `longest`.

    16, 24, 32, 48, 64, 96, …: at most a third of a bucket is padding, and twice the length
    costs two more programs.
    """
    lengths = []
    power = SHORTEST_BUCKET
    while power < longest:
        lengths += [length for length in (power, power + power // 2) if length < longest]
        power *= 2
    return (*lengths, longest)


def halving_buckets(longest: int, *, shortest: int) -> tuple[int, ...]:
    """`longest` and its halves, rounded up, down to `shortest`; ascending."""
    assert shortest > 1, "a length of 1 is its own half"
    lengths = [longest]
    while (half := -(-lengths[-1] // 2)) >= shortest:
        lengths.append(half)
    return tuple(reversed(lengths))


def busy_buckets(buckets: Sequence[int], lengths: Sequence[int], *, together: int) -> tuple[int, ...]:
    """The buckets that would be the right one often enough, and all that hold the longest length.

    A bucket is filled by `together` lengths at a time, so a short one waits for all of them to
    be short. If a random draw does that less than once in twenty times, a longer bucket serves.
    """
    return tuple(
        bucket
        for bucket in buckets
        if (sum(length <= bucket for length in lengths) / len(lengths)) ** together >= 1 / 20
    )


FEWEST_SLOTS = 8
"""A token takes hardly less time in fewer slots of one replica."""

MOST_SLOT_COUNTS = 4
"""Each compiles programs of its own."""


def slot_counts(most: int) -> tuple[int, ...]:
    """Slots of a replica that are decoded together: all, or of its halves, ascending."""
    return halving_buckets(most, shortest=FEWEST_SLOTS)[-MOST_SLOT_COUNTS:]


def whole(lengths: Sequence[int], *, multiple: int) -> tuple[int, ...]:
    """Ascending lengths rounded up to a multiple, each once."""
    return tuple(sorted({-(-length // multiple) * multiple for length in lengths}))


def fit(length: int, buckets: Sequence[int]) -> int:
    """The smallest bucket that holds `length`."""
    return buckets[bisect_left(buckets, length)]


CAPACITY_STEP = 32


MOST_CAPACITIES = 8
"""The cache of all slots grows with the longest response in equal parts: few programs, and little read in vain."""


def cache_capacities(longest: int) -> tuple[int, ...]:
    """Tokens that the cache of a slot may hold: the last is `longest`, the others multiples of one size."""
    size = CAPACITY_STEP * -(-longest // (MOST_CAPACITIES * CAPACITY_STEP))
    return (*range(size, longest, size), longest)


RING_STEP = 64
"""Tokens that are known of a prompt are a multiple of it, where rings keep less than all of a slot."""


def ring_behind(tokens_per_dispatch: int) -> tuple[int, int]:
    """Tokens that the newest one in a ring may be ahead of the end of a response and of a prompt that goes on from it.

    Two dispatches are on their way at most, and a prompt may leave out the end of a response.
    """
    ahead = 2 * tokens_per_dispatch
    return ahead, ahead + 2 * RING_STEP


def ring_entries(config: AnyModel, *, longest: int, tokens_per_dispatch: int) -> int | None:
    """R of layers with a window; None where that is no less than the longest sequence has."""
    if not isinstance(config, ModelConfig) or config.sliding_window is None or config.latent is not None:
        return None
    entries = config.sliding_window + ring_behind(tokens_per_dispatch)[1]
    entries = -(-entries // CAPACITY_STEP) * CAPACITY_STEP
    return entries if entries < longest else None


def with_rings(config: AnyModel, execution: Execution, *, longest: int, tokens_per_dispatch: int) -> Execution:
    """The execution with rings for layers with a window, where a cache in slots has them."""
    if execution.pages_kernel is not None:
        return execution
    entries = ring_entries(config, longest=longest, tokens_per_dispatch=tokens_per_dispatch)
    return replace(execution, ring_entries=entries)
