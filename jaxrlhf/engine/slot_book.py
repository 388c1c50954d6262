"""State of the slots on the host, and the windows that were dispatched and not read yet."""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np

from jaxrlhf.batch import Diverged
from jaxrlhf.config import Sampling
from jaxrlhf.engine import programs
from jaxrlhf.engine.sampling import settings_of
from jaxrlhf.engine.scheduler import Placement


class Drawn(NamedTuple):
    """Tokens that one slot drew since it was last read.

    Attributes:
      active: Whether its response goes on; if not, the slot is free.
      choice_WLk: int16, experts of the tokens that were run; None if not recorded.
    """

    slot: int
    tokens: list[int]
    logps: list[float]
    active: bool
    choice_WLk: np.ndarray | None


class _Unread(NamedTuple):
    """A window on its way: which slot each of its rows is, and which of them drew their first token before it."""

    window: programs.Window
    slot_B: np.ndarray
    fresh_B: np.ndarray


class SlotBook:
    """Slots as of the last window that was read.

    Args:
      tokens_per_dispatch: Most tokens that a window adds to a slot.

    Attributes:
      slot_B: Which slot each row of the device's arrays is.
    """

    def __init__(self, *, slots: int, tokens_per_dispatch: int) -> None:
        self._window_tokens = tokens_per_dispatch
        self._unread: deque[_Unread] = deque()
        self.slot_B = np.arange(slots)
        # These are by slot, not by row.
        self._active_B, self._fresh_B = np.zeros(slots, bool), np.zeros(slots, bool)
        self._cached_B, self._limit_B = np.zeros(slots, np.int64), np.zeros(slots, np.int64)

    @property
    def taken_B(self) -> np.ndarray:
        """Slots whose response goes on or was not read yet."""
        return self._active_B | self._fresh_B

    @property
    def unread(self) -> int:
        """Windows that were dispatched and not read."""
        return len(self._unread)

    @property
    def next_tokens_B(self) -> np.ndarray:
        """Most tokens that each slot may hold after the next window; by slot."""
        cached_B = self._cached_B + (self.unread + 1) * self._window_tokens
        return np.where(self.taken_B, np.minimum(cached_B, self._limit_B), 0)

    @property
    def outlasts(self) -> bool:
        """True if a response may go on after the windows that were not read."""
        return bool((self._cached_B + self.unread * self._window_tokens < self._limit_B)[self.taken_B].any())

    def start(self, slot: int, prompt_tokens: int, *, limit: int) -> None:
        """A response of at most `limit` tokens takes a slot, and its first token is drawn."""
        assert not self.taken_B[slot], f"slot {slot} is taken"
        self._fresh_B[slot] = True
        self._cached_B[slot] = prompt_tokens
        self._limit_B[slot] = prompt_tokens + limit - 1  # the last token is drawn and never run

    def dispatched(self, window: programs.Window) -> None:
        """A window is on its way."""
        self._unread.append(_Unread(window, self.slot_B, self._fresh_B[self.slot_B]))
        self._active_B |= self._fresh_B
        self._fresh_B[:] = False

    def forget(self) -> None:
        """Let go of windows that nobody reads; no slot may be active."""
        assert not self.taken_B.any(), "the window of an active slot has to be read"
        self._unread.clear()

    def keep(self, slot_B: np.ndarray) -> None:
        """The device's arrays have rows for these slots from now on."""
        self.slot_B = slot_B

    def read(self) -> list[Drawn]:
        """Wait for the oldest window, and split it by slot; the first token of a new response counts.

        Raises:
          Diverged: The policy's logits are not finite.
        """
        assert self._unread, "nothing was dispatched"
        device_window, slot_B, fresh_B = self._unread.popleft()
        token_WB, logp_WB, active_B, choice_WBLk = jax.device_get(device_window)
        if not np.isfinite(logp_WB).all():
            raise Diverged(
                "the policy's logits are not finite: its weights diverged or overflow; resume from the last checkpoint "
                "with a lower learning rate (if this comes again at once it holds such weights too: delete it for the "
                "one before), and look at samples.jsonl"
            )
        count_B = (token_WB[1:] != programs.NO_TOKEN).sum(axis=0)
        tokens, logps = token_WB.T.tolist(), logp_WB.T.tolist()
        drawn = []
        for row in np.flatnonzero(self._active_B[slot_B]).tolist():
            # Row 0 was drawn at the insertion, or was read with the window before.
            span = slice(0 if fresh_B[row] else 1, 1 + int(count_B[row]))
            choice_WLk = None if choice_WBLk is None else np.asarray(choice_WBLk[: count_B[row], row])
            drawn.append(Drawn(int(slot_B[row]), tokens[row][span], logps[row][span], bool(active_B[row]), choice_WLk))
        self._cached_B[slot_B] += count_B
        self._active_B[slot_B] = active_B
        return drawn


def insertion_of(placements: Sequence[Placement], *, rows: int, slots: int, most_stops: int) -> programs.Insertion:
    """Insertion of these responses, as host arrays of `rows` rows; rows that are left fill no slot.

    Args:
      slots: Number of slots.
      most_stops: E, stop tokens that a response may have.
    """
    left = rows - len(placements)
    sequences = [placement.sequence for placement in placements]
    stop_BE = np.full((rows, most_stops), -1, np.int32)
    for row, sequence in enumerate(sequences):
        stop_BE[row, : len(sequence.stop_tokens)] = sequence.stop_tokens
    return programs.Insertion(
        row_I=np.array([placement.row for placement in placements] + [0] * left, np.int32),
        slot_I=np.array([placement.slot for placement in placements] + [slots] * left, np.int32),
        seed_B=np.array([sequence.seed for sequence in sequences] + [0] * left, np.uint32),
        request_B=np.array([sequence.request.request_id for sequence in sequences] + [0] * left, np.uint32),
        limit_B=np.array([sequence.limit for sequence in sequences] + [0] * left, np.int32),
        stop_BE=stop_BE,
        settings=settings_of([sequence.sampling for sequence in sequences] + [Sampling()] * left),
    )
