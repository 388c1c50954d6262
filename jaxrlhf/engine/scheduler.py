"""Scheduler: which sequence sits in which slot; it knows no array.

A sequence goes through four states: *queued* with all that have its prompt; *prefilled*, when the prompt was handed to
a prefill and the sequence waits for a slot; *placed* in a slot that draws its tokens; *completed*, which frees the
slot. Sequences with one prompt are prefilled together, and at most one prefill is held at a time.
"""

from collections import deque
from collections.abc import Callable
from itertools import islice
from time import monotonic
from typing import Any, NamedTuple

from jaxrlhf.engine.sequence import SequenceState


class Placement(NamedTuple):
    """A sequence, the row of its prompt in the newest prefill, and the slot that it takes."""

    row: int
    slot: int
    sequence: SequenceState


class Scheduler:
    """Queue and slots.

    The driver repeats, while `unfinished`: if `refill_due`, then while `placeable`, `take_prompts`
    if `prefill_due` and `place`; decode; `end` the sequences that drew their last token.
    """

    def __init__(self, *, slots: int) -> None:
        self._queued: dict[tuple[int, ...], list[SequenceState]] = {}
        self._prefilled: deque[tuple[int, SequenceState]] = deque()
        self._placed: list[SequenceState | None] = [None] * slots
        self._free = deque(range(slots))
        self._under_way: set[SequenceState] = set()
        self._unplaced = 0

    def add(self, sequence: SequenceState) -> None:
        """Put a sequence in the queue."""
        self._under_way.add(sequence)
        self._queued.setdefault(sequence.request.prompt, []).append(sequence)
        self._unplaced += 1

    @property
    def unfinished(self) -> bool:
        """A sequence was added and has not ended."""
        return bool(self._under_way)

    @property
    def waiting(self) -> bool:
        """A sequence has no slot yet."""
        return self._unplaced > 0

    @property
    def refill_due(self) -> bool:
        """Enough slots are free to be worth a prefill: an eighth of all, or one for each sequence left."""
        return 0 < min(self._unplaced, max(1, len(self._placed) // 8)) <= len(self._free)

    @property
    def placeable(self) -> bool:
        """A slot is free and a sequence waits for one."""
        return bool(self._free) and self._unplaced > 0

    @property
    def prefilled(self) -> int:
        """Sequences that wait for a slot although their prompt was prefilled."""
        return len(self._prefilled)

    @property
    def prefill_due(self) -> bool:
        """The prompts prefilled last have all their sequences in slots, and more are queued."""
        return not self._prefilled and bool(self._queued)

    def take_prompts(
        self, most: Callable[[Any], int], kind: Callable[[SequenceState], Any] = lambda _: None
    ) -> list[tuple[int, ...]]:
        """The next prompts in the queue, to be prefilled in this order of rows.

        Args:
          most: How many of a kind run together.
          kind: What prompts that run together have in common; only those like the first in the queue are taken.
        """
        assert self.prefill_due, "prompts prefilled earlier still wait for slots"
        of_first = kind(next(iter(self._queued.values()))[0])
        alike = (prompt for prompt, sequences in self._queued.items() if kind(sequences[0]) == of_first)
        prompts = list(islice(alike, most(of_first)))
        for row, prompt in enumerate(prompts):
            self._prefilled.extend((row, sequence) for sequence in self._queued.pop(prompt))
        return prompts

    def place(self, most: int, *, used: Callable[[int], int] = lambda _: 0) -> list[Placement]:
        """Put sequences of the prefilled prompts into free slots.

        Args:
          used: When a slot that holds what may be of use was used last; 0 for one that holds nothing. The least is
            taken first, and of equal ones the one that became free first.
        """
        placements = []
        for _ in range(min(most, len(self._free), len(self._prefilled))):
            row, sequence = self._prefilled.popleft()
            self._unplaced -= 1
            placements.append(self._seated(sequence, row, min(self._free, key=used)))
        return placements

    def seat(self, sequence: SequenceState, row: int) -> Placement:
        """Put a sequence into a free slot that waited nowhere, given its row of what is placed with it."""
        self._under_way.add(sequence)
        return self._seated(sequence, row, self._free[0])

    def _seated(self, sequence: SequenceState, row: int, slot: int) -> Placement:
        self._free.remove(slot)
        self._placed[slot], sequence.slot, sequence.placed_at = sequence, slot, monotonic()
        return Placement(row, slot, sequence)

    def placed(self, slot: int) -> SequenceState:
        """The sequence in a slot."""
        sequence = self._placed[slot]
        assert sequence is not None, f"slot {slot} is free and cannot draw tokens"
        return sequence

    def end(self, sequence: SequenceState) -> int:
        """Free the slot of a sequence; returns it."""
        assert sequence.slot is not None, "a sequence that waits cannot end"
        self._placed[sequence.slot] = None
        self._free.append(sequence.slot)
        self._under_way.discard(sequence)
        return sequence.slot

    def drop(self, sequence: SequenceState) -> None:
        """Forget a sequence, if it waits."""
        if sequence not in self._under_way or sequence.slot is not None:
            return
        prompt = sequence.request.prompt
        if sequence in self._queued.get(prompt, ()):
            self._queued[prompt].remove(sequence)
            if not self._queued[prompt]:
                del self._queued[prompt]
        else:
            self._prefilled = deque(pair for pair in self._prefilled if pair[1] is not sequence)
        self._under_way.discard(sequence)
        self._unplaced -= 1

    def is_placed(self, sequence: SequenceState) -> bool:
        """The sequence draws tokens in a slot."""
        return sequence.slot is not None and self._placed[sequence.slot] is sequence
