"""Interruptible generation: responses are interrupted in their slots and continue later under newer weights.

Source: AReaL (arXiv:2505.24298), which recomputes the KV cache, and PipelineRL (arXiv:2509.19128), which keeps it.
"""

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from jaxrlhf.config import Refusal, Sampling
from jaxrlhf.engine import checks
from jaxrlhf.engine.cache.held import HeldCache, HeldRows, Newest, can_hold, go_on, prefilled_of, taken, together
from jaxrlhf.engine.engine import Engine
from jaxrlhf.engine.scheduler import Placement
from jaxrlhf.engine.sequence import Completion, Request, SequenceState


class InterruptibleEngine(Engine):
    """Engine whose responses may be interrupted, and continue from the keys and values they had."""

    def check_holds(self) -> None:
        """Raise `Refusal` if the caches of responses cannot be taken out of their slots."""
        if not can_hold(self._shape.config):
            raise Refusal(
                "rollout.on_new_weights='keep' has responses go on from their keys and values, and this model keeps "
                "states of linear attention, or a cache of its own; leave it at 'recompute'"
            )
        if (ways := self.execution.cache_ways) > 1:
            raise Refusal(
                "rollout.on_new_weights='keep' takes caches out of slots, and these are in parts on the devices of "
                f"generation_context={ways}; leave it at 'recompute'"
            )

    def held(self, sequences: Sequence[SequenceState]) -> list[HeldCache | None]:
        """Copy the keys and values of responses in progress to the host, for `go_on`; None for a response without slot.

        No window may be unread, since a window writes to the cache.
        """
        assert not self.book.unread, "finish_windows() comes first"
        placed = [place for place, sequence in enumerate(sequences) if self._scheduler.is_placed(sequence)]
        if not placed:
            return [None] * len(sequences)
        if everything := self.book.with_all():
            self._rearrange(everything)
        own = [sequences[place] for place in placed]
        slot_B = [slot for sequence in own if (slot := sequence.slot) is not None]
        lengths = [len(sequence.request.prompt_tokens) + len(sequence.tokens) - 1 for sequence in own]
        found = dict(zip(placed, taken(self.cache, self._slots_there(), slot_B, lengths, self.prefill), strict=True))
        return [found.get(place) for place in range(len(sequences))]

    def go_on(self, sequences: Sequence[SequenceState], held: Sequence[HeldCache]) -> None:
        """Continue responses from their held caches, of whatever weights, before other requests take slots.

        The prompts of their requests contain all tokens so far; the newest token is run next. There must be enough free
        slots for all of them.
        """
        assert len(self.book.slot_B) == self.slots and not self.book.unread, "go_on needs all rows and no unread window"
        assert len(sequences) <= self.slots - self.book.active, "more held responses than free slots; enqueue the rest"
        for group in together([one.length for one in held], self.prefill):
            own = [held[place] for place in group.places]
            placements = [self._scheduler.seat(sequences[place], row) for row, place in enumerate(group.places)]
            for (_, slot, sequence), one in zip(placements, own, strict=True):
                self.book.go_on(slot, one.length, limit=sequence.limit - sequence.request.drawn)
                self._contents.start(slot, sequence, first=one.length)  # a ring may have held less than its window
            self._put(placements, own, group)

    def generate_groups(
        self,
        requests: Sequence[Request],
        sampling: Sampling,
        *,
        seed: int,
        copies: int,
        counts: Sequence[int],
        progress: Callable[[int, int], None],
        on_completion: Callable[[Completion], None] | None = None,
    ) -> Iterator[list[Completion]]:
        """Answer requests as `generate` does, and yield groups of responses as soon as they are complete.

        The order in which groups complete depends on numbers of tokens, not on time. Generation pauses between two
        yields. The cache is freed before the last yield.

        Args:
          copies: Number of requests of a group; they are adjacent in `requests`.
          counts: Number of groups of each yield; they add up to all groups.

        Yields:
          Completions of the next complete groups, in the order of the requests.
        """
        checks.check_unique(requests)
        assert not self.unfinished, "requests of an earlier call are unfinished"
        group_of = {request.request_id: place // copies for place, request in enumerate(requests)}
        left, completions = [copies] * (len(requests) // copies), dict[int, Completion]()
        complete: list[int] = []
        for request in requests:
            self.add(request, sampling, seed=seed)
        for count in counts:
            while len(complete) < count:
                for completion in self.step():
                    completions[completion.request_id] = completion
                    left[group := group_of[completion.request_id]] -= 1
                    complete += [group] * (left[group] == 0)
                    if on_completion is not None:
                        on_completion(completion)
                progress(len(completions), len(requests))
            given, complete = sorted(complete[:count]), complete[count:]
            if not (self.unfinished or complete):
                self.free()
            asked = [request for group in given for request in requests[group * copies : (group + 1) * copies]]
            yield [completions[request.request_id] for request in asked]

    def compile_held(self) -> None:
        """Compile the programs that take responses out of slots and put them back, for every possible length."""
        if not self.compiled.has_devices:
            return
        for width in self.prefill.past_widths:
            shortest = min(width, self.context_tokens - 1)
            [group] = together([shortest], self.prefill)
            for size in self.cache.sizes_for(width // 2):
                self.cache.grow(size)
                [held] = taken(self.cache, self._slots_there(), [0], [shortest], self.prefill)
                if size in self.cache.sizes_for(width):  # else the cache grows first
                    self._put([], [held], group)
            self.free()

    def _put(self, placements: Sequence[Placement], held: Sequence[HeldCache], group: HeldRows) -> None:
        """Write the state and the cache of the slots whose responses continue."""
        insertion = self._insertion(placements)
        newest = _newest(placements, held, rows=self.insertions)
        state = self._slots_there()
        self._slots = self.compiled.run(("go on",), go_on, state, newest, insertion, out=self._layout.slots, donate=0)
        slots = [slot for _, slot, _ in placements] or [self.slots] * len(held)
        version, put = self._loaded().version, self.compiled.put
        prefilled = prefilled_of(held, slots, group, self._layout, put=put, version=version)
        self.cache.place(prefilled, insertion.row_I, insertion.slot_I)


def _newest(placements: Sequence[Placement], held: Sequence[HeldCache], *, rows: int) -> Newest:
    """Return the newest tokens of responses, in `rows` rows (those of an insertion)."""
    newest = Newest(*(np.zeros(rows, np.int32) for _ in Newest._fields))
    for index, ((_, _, sequence), one) in enumerate(zip(placements, held, strict=False)):
        newest.token_I[index] = sequence.request.prompt_tokens[-1]
        newest.cached_I[index], newest.offset_I[index] = one.length, one.offset
    return newest
