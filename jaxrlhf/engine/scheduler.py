"""Scheduler: assignment of sequences to slots, without any array.

A sequence goes through four states: *queued*, together with all sequences of its prompt; *prefilled*, when the prompt
was passed to a prefill and the sequence waits for a slot; *placed* in a slot that samples its tokens; *completed*,
when its slot is free again. Sequences with one prompt are prefilled together. At most one prefill is held at a time.
"""

from collections import deque
from collections.abc import Callable
from itertools import islice
from time import monotonic
from typing import Any, NamedTuple

from jaxrlhf.engine.sequence import SequenceState


class Placement(NamedTuple):
    """Placement of a sequence: the row of its prompt in the newest prefill, and its slot."""

    row: int
    slot: int
    sequence: SequenceState


class Scheduler:
    """Queue of sequences, and the sequences in slots, which are split evenly over replicas.

    While `unfinished`, the engine repeats three steps:
      1. If `refill_due`: while `placeable`, call `take_prompts` (if `prefill_due`) and `place`.
      2. Decode.
      3. Call `end` for the sequences that sampled their last token.
    """

    def __init__(self, *, slots: int, replicas: int = 1) -> None:
        self._queued: dict[tuple[int, ...], list[SequenceState]] = {}
        self._prefilled: deque[tuple[int, SequenceState]] = deque()
        self._placed: list[SequenceState | None] = [None] * slots
        self._free = deque(range(slots))
        self._replicas = replicas
        self._in_progress: set[SequenceState] = set()
        self._unplaced = 0

    def add(self, sequence: SequenceState) -> None:
        """Put a sequence in the queue."""
        self._in_progress.add(sequence)
        self._queued.setdefault(sequence.request.prompt, []).append(sequence)
        self._unplaced += 1

    @property
    def unfinished(self) -> bool:
        """True if a sequence was added and has not ended."""
        return bool(self._in_progress)

    @property
    def waiting(self) -> bool:
        """True if a sequence has no slot yet."""
        return self._unplaced > 0

    @property
    def refill_due(self) -> bool:
        """True if enough slots are free to be worth a prefill: an eighth of all, or one per waiting sequence."""
        return 0 < min(self._unplaced, max(1, len(self._placed) // 8)) <= len(self._free)

    @property
    def placeable(self) -> bool:
        """True if a slot is free and a sequence waits for a slot."""
        return bool(self._free) and self._unplaced > 0

    @property
    def prefilled(self) -> int:
        """Number of sequences with a prefilled prompt that wait for a slot."""
        return len(self._prefilled)

    @property
    def prefill_due(self) -> bool:
        """True if all sequences of the last prefill are in slots, and more sequences are queued."""
        return not self._prefilled and bool(self._queued)

    def next_slots(self, used: Callable[[int], int]) -> list[int]:
        """Return the free slots for the sequences that wait, in the order in which `place` takes them.

        Replicas get equal numbers of slots in use; one replica takes consecutive sequences, which may share a prompt.
        Slots without reusable content are first, then the least recently used slots; among equals the slot that became
        free first.

        Args:
          used: Function from a slot to the number of its last use; 0 if the slot has no reusable content.
        """
        count, own = min(self._unplaced, len(self._free)), len(self._placed) // self._replicas
        in_order = sorted(self._free, key=used)
        in_use = len(self._placed) - sum(not used(slot) for slot in in_order)
        most = -(-(in_use + count) // self._replicas)
        chosen: list[int] = []
        for replica in range(self._replicas):
            free = [slot for slot in in_order if slot // own == replica and not used(slot)]
            chosen += free[: max(0, most - own + len(free))]
        return (chosen + [slot for slot in in_order if slot not in chosen])[:count]

    def take_prompts(
        self, most: Callable[[Any], int], kind: Callable[[SequenceState], Any] = lambda _: None
    ) -> list[tuple[int, ...]]:
        """Take the next prompts from the queue; their order is the order of the rows of the prefill.

        Args:
          most: Function from a kind to the maximum number of its prompts in one prefill.
          kind: Function from a sequence to the kind of its prompt; only prompts of the first prompt's kind are taken.
        """
        assert self.prefill_due, "prompts prefilled earlier still wait for slots"
        of_first = kind(next(iter(self._queued.values()))[0])
        alike = (prompt for prompt, sequences in self._queued.items() if kind(sequences[0]) == of_first)
        prompts = list(islice(alike, most(of_first)))
        for row, prompt in enumerate(prompts):
            self._prefilled.extend((row, sequence) for sequence in self._queued.pop(prompt))
        return prompts

    def place(self, most: int, *, used: Callable[[int], int] = lambda _: 0) -> list[Placement]:
        """Put up to `most` sequences of the prefilled prompts into `next_slots`."""
        placements = []
        for slot in self.next_slots(used)[: min(most, len(self._prefilled))]:
            row, sequence = self._prefilled.popleft()
            self._unplaced -= 1
            self._free.remove(slot)
            self._placed[slot], sequence.slot, sequence.placed_at = sequence, slot, monotonic()
            placements.append(Placement(row, slot, sequence))
        return placements

    def placed(self, slot: int) -> SequenceState:
        """Return the sequence in a slot."""
        sequence = self._placed[slot]
        assert sequence is not None, f"slot {slot} is free and cannot sample tokens"
        return sequence

    def end(self, sequence: SequenceState) -> int:
        """Free the slot of a sequence and return the slot."""
        assert sequence.slot is not None, "a sequence that waits cannot end"
        self._placed[sequence.slot] = None
        self._free.append(sequence.slot)
        self._in_progress.discard(sequence)
        return sequence.slot

    def drop(self, sequence: SequenceState) -> None:
        """Remove a sequence that waits; do nothing if it is in a slot or has ended."""
        if sequence not in self._in_progress or sequence.slot is not None:
            return
        prompt = sequence.request.prompt
        if sequence in self._queued.get(prompt, ()):
            self._queued[prompt].remove(sequence)
            if not self._queued[prompt]:
                del self._queued[prompt]
        else:
            self._prefilled = deque(pair for pair in self._prefilled if pair[1] is not sequence)
        self._in_progress.discard(sequence)
        self._unplaced -= 1

    def is_placed(self, sequence: SequenceState) -> bool:
        """Return True if the sequence is in a slot."""
        return sequence.slot is not None and self._placed[sequence.slot] is sequence
