"""Bucket sizes that programs are compiled for: few lengths, none of which pads an input by much."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace

from jaxrlhf.models import ONE_DEVICE, AnyModel, Execution
from jaxrlhf.models.config import ModelConfig

SHORTEST_BUCKET = 16


@dataclass(frozen=True)
class Shape:
    """Compile-time sizes that all programs of an engine share; lengths vary between programs and are not here.

    Attributes:
      replicas: Number of parts that the slots are split into.
      most_stop_tokens: Maximum number of stop token ids of a response.
      tokens_per_dispatch: Maximum number of tokens that a slot samples in one `decode`.
      records_routing: True to record the experts that each token goes through.
      most_kept: K, maximum size of a recorded sampling mask (`Sampled.kept_BK`); 0 records none.
    """

    config: AnyModel
    replicas: int
    most_stop_tokens: int
    tokens_per_dispatch: int
    execution: Execution = ONE_DEVICE
    records_routing: bool = False
    most_kept: int = 0

    @property
    def has_mrope(self) -> bool:
        """True if the positions of tokens after images differ from the tokens' indices (M-RoPE)."""
        return self.config.vision is not None and self.config.vision.sections is not None


def length_buckets(longest: int) -> tuple[int, ...]:
    """Return the lengths that programs are compiled for: numbers of two significant bits, and last `longest`.

    16, 24, 32, 48, 64, 96, ...: at most a third of a bucket is padding, and twice the length costs two more programs.
    """
    lengths = []
    power = SHORTEST_BUCKET
    while power < longest:
        lengths += [length for length in (power, power + power // 2) if length < longest]
        power *= 2
    return (*lengths, longest)


def halving_buckets(longest: int, *, shortest: int) -> tuple[int, ...]:
    """Return `longest` and its repeated halves (rounded up) down to `shortest`, ascending."""
    assert shortest > 1, "a length of 1 is its own half"
    lengths = [longest]
    while (half := -(-lengths[-1] // 2)) >= shortest:
        lengths.append(half)
    return tuple(reversed(lengths))


def busy_buckets(buckets: Sequence[int], lengths: Sequence[int], *, together: int) -> tuple[int, ...]:
    """Return the buckets that hold a whole random batch at least once in twenty times.

    A batch has `together` prompts, so a short bucket is usable only if all of them are short. Batches of a dropped
    bucket are padded to the next longer bucket. Every bucket that holds the longest length stays.
    """
    return tuple(
        bucket
        for bucket in buckets
        if (sum(length <= bucket for length in lengths) / len(lengths)) ** together >= 1 / 20
    )


FEWEST_SLOTS = 8
"""Smallest number of slots of a replica; each smaller number would be another program."""


def slot_counts(most: int, *, fewest: int | None = None) -> tuple[int, ...]:
    """Return the numbers of slots that a replica may decode together: all of them, and repeated halves, ascending.

    Args:
      fewest: Smallest number; None is `FEWEST_SLOTS`.
    """
    return halving_buckets(most, shortest=fewest or FEWEST_SLOTS)


def whole(lengths: Sequence[int], *, multiple: int) -> tuple[int, ...]:
    """Return the distinct lengths rounded up to a multiple, ascending."""
    return tuple(sorted({-(-length // multiple) * multiple for length in lengths}))


def fit(length: int, buckets: Sequence[int]) -> int:
    """Return the smallest bucket that holds `length`."""
    return buckets[bisect_left(buckets, length)]


CAPACITY_STEP = 32


MOST_CAPACITIES = 8
"""Maximum number of cache capacities. The cache of all slots grows with the longest response in this many equal parts:
few programs to compile, and little unused cache to read."""


def cache_capacities(longest: int) -> tuple[int, ...]:
    """Return the capacities of a slot's cache, in tokens: multiples of one size, and last `longest`."""
    size = CAPACITY_STEP * -(-longest // (MOST_CAPACITIES * CAPACITY_STEP))
    return (*range(size, longest, size), longest)


RING_STEP = 64
"""Granularity of prefix reuse where layers keep rings: the reused tokens of a prompt are a multiple of this number."""


def ring_behind(tokens_per_dispatch: int) -> tuple[int, int]:
    """Return how many tokens a ring may hold past a response's end, and past the part of it that a later prompt has.

    At most two dispatches are in flight, and a prompt may leave out the end of the response that it continues.
    """
    ahead = 2 * tokens_per_dispatch
    return ahead, ahead + 2 * RING_STEP


def ring_entries(config: AnyModel, *, longest: int, tokens_per_dispatch: int) -> int | None:
    """Return R, the ring size of sliding-window layers; None if R is not below the longest sequence."""
    if not isinstance(config, ModelConfig) or config.sliding_window is None or config.latent is not None:
        return None
    entries = config.sliding_window + ring_behind(tokens_per_dispatch)[1]
    entries = -(-entries // CAPACITY_STEP) * CAPACITY_STEP
    return entries if entries < longest else None


def with_rings(config: AnyModel, execution: Execution, *, longest: int, tokens_per_dispatch: int) -> Execution:
    """Return the execution with the ring size of sliding-window layers set; a paged cache has no rings."""
    if execution.pages_kernel is not None:
        return execution
    entries = ring_entries(config, longest=longest, tokens_per_dispatch=tokens_per_dispatch)
    return replace(execution, ring_entries=entries)
