"""Scheduler: which sequence sits in which slot; it knows no array.

A sequence goes through four states: *queued* with all that have its prompt; *prefilled*, when the prompt was handed to
a prefill and the sequence waits for a slot; *placed* in a slot that draws its tokens; *completed*, which frees the
slot. Sequences with one prompt are prefilled together, and at most one prefill is held at a time.
"""

from collections import deque
from collections.abc import Callable
from itertools import islice
from typing import NamedTuple

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
        self._keys: set[tuple[int, int]] = set()
        self._unplaced = 0

    def add(self, sequence: SequenceState) -> None:
        """Put a sequence in the queue.

        Raises:
          ValueError: Another one under way has its seed and request_id.
        """
        if sequence.key in self._keys:
            raise ValueError("two requests have the same request_id and would be drawn alike; make the ids unique")
        self._keys.add(sequence.key)
        self._queued.setdefault(sequence.request.prompt_tokens, []).append(sequence)
        self._unplaced += 1

    @property
    def unfinished(self) -> bool:
        """A sequence was added and has not ended."""
        return bool(self._keys)

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

    def take_prompts(self, most: int, *, kind: Callable[[SequenceState], int] = lambda _: 0) -> list[tuple[int, ...]]:
        """The next prompts in the queue, to be prefilled in this order of rows.

        Args:
          kind: What prompts that run together have in common; only those like the first in the queue are taken.
        """
        assert self.prefill_due, "prompts prefilled earlier still wait for slots"
        of_first = kind(next(iter(self._queued.values()))[0])
        alike = (prompt for prompt, sequences in self._queued.items() if kind(sequences[0]) == of_first)
        prompts = list(islice(alike, most))
        for row, prompt in enumerate(prompts):
            self._prefilled.extend((row, sequence) for sequence in self._queued.pop(prompt))
        return prompts

    def place(self, most: int) -> list[Placement]:
        """Put sequences of the prefilled prompts into free slots."""
        placements = []
        for _ in range(min(most, len(self._free), len(self._prefilled))):
            row, sequence = self._prefilled.popleft()
            sequence.slot = slot = self._free.popleft()
            self._placed[slot] = sequence
            self._unplaced -= 1
            placements.append(Placement(row, slot, sequence))
        return placements

    def placed(self, slot: int) -> SequenceState:
        """The sequence in a slot."""
        sequence = self._placed[slot]
        assert sequence is not None, f"slot {slot} is free and cannot draw tokens"
        return sequence

    def end(self, sequence: SequenceState) -> None:
        """Free the slot of a sequence."""
        assert sequence.slot is not None, "a sequence that waits cannot end"
        self._placed[sequence.slot] = None
        self._free.append(sequence.slot)
        self._keys.discard(sequence.key)
