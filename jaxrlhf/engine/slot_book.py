"""State of the slots on the host, and the windows that were dispatched and not read yet."""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np

from jaxrlhf.batch import Diverged
from jaxrlhf.config import Sampling
from jaxrlhf.engine import programs
from jaxrlhf.engine.buckets import fit
from jaxrlhf.engine.sampling import settings_of
from jaxrlhf.engine.scheduler import Placement
from jaxrlhf.engine.sequence import Drawn


class Arrangement(NamedTuple):
    """Rows of the device's arrays in G replicas, made of rows that are there.

    Attributes:
      row_GB: Row that each is made of, counted from the first of its replica.
      goes_on_GB: False where the response of that row does not go on.
      slot_B: Slot that each row then is.
    """

    row_GB: np.ndarray
    goes_on_GB: np.ndarray
    slot_B: np.ndarray


class _Unread(NamedTuple):
    """A window on its way: which slot each of its rows is, and which of them drew their first token before it."""

    window: programs.Window
    slot_B: np.ndarray
    fresh_B: np.ndarray


class SlotBook:
    """Slots as of the last window that was read.

    Args:
      tokens_per_dispatch: Most tokens that a window adds to a slot.
      replicas: Equal parts that the slots are in.

    Attributes:
      slot_B: Which slot each row of the device's arrays is.
    """

    def __init__(self, *, slots: int, tokens_per_dispatch: int, replicas: int) -> None:
        self._window_tokens, self._replicas = tokens_per_dispatch, replicas
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
    def active(self) -> int:
        """Number of those slots."""
        return int(self.taken_B.sum())

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

    def go_on(self, slot: int, cached_tokens: int, *, limit: int) -> None:
        """A response takes a slot that draws at most `limit` tokens after its newest, which was read before."""
        assert not self.taken_B[slot], f"slot {slot} is taken"
        self._active_B[slot] = True
        self._cached_B[slot], self._limit_B[slot] = cached_tokens, cached_tokens + limit

    def dispatched(self, window: programs.Window) -> None:
        """A window is on its way."""
        self._unread.append(_Unread(window, self.slot_B, self._fresh_B[self.slot_B]))
        self._active_B |= self._fresh_B
        self._fresh_B[:] = False

    def forget(self) -> None:
        """Let go of windows that nobody reads; no slot may be active."""
        assert not self.taken_B.any(), "the window of an active slot has to be read"
        self._unread.clear()

    def stop(self, slots: Sequence[int]) -> None:
        """Responses end that would have gone on; windows on their way may still have tokens of theirs."""
        self._active_B[list(slots)] = self._fresh_B[list(slots)] = False

    def all_but(self, slots: Sequence[int]) -> Arrangement:
        """The rows as they are, of which those of some slots go on no longer."""
        row_GB = np.tile(np.arange(len(self.slot_B) // self._replicas, dtype=np.int32), (self._replicas, 1))
        return Arrangement(row_GB, ~np.isin(self.slot_B, slots).reshape(row_GB.shape), self.slot_B)

    def without_idle(self, kept_B: np.ndarray, counts: Sequence[int]) -> Arrangement | None:
        """The fewest rows that hold slots in use and those that are kept, by slot; None if all there are do.

        Args:
          counts: Rows of a replica that there may be, ascending.
        """
        busy_GB = (self.taken_B | kept_B)[self.slot_B].reshape(self._replicas, -1)
        count = fit(int(busy_GB.sum(axis=1).max()), counts)
        if not busy_GB.any() or count >= busy_GB.shape[1]:
            return None
        row_GB = np.argsort(~busy_GB, axis=1, kind="stable")[:, :count].astype(np.int32)
        first_G1 = np.arange(self._replicas)[:, None] * busy_GB.shape[1]
        return Arrangement(row_GB, np.ones_like(row_GB, bool), self.slot_B[(row_GB + first_G1).reshape(-1)])

    def with_all(self) -> Arrangement | None:
        """Rows for all slots, of which those that come back are idle; None if they are there."""
        slots, rows = len(self._active_B), len(self.slot_B)
        if rows == slots:
            return None
        row_B, here_B = np.zeros(slots, np.int32), np.zeros(slots, bool)
        row_B[self.slot_B], here_B[self.slot_B] = np.arange(rows) % (rows // self._replicas), True
        shape = self._replicas, slots // self._replicas
        return Arrangement(row_B.reshape(shape), here_B.reshape(shape), np.arange(slots))

    def read(self) -> list[Drawn]:
        """Wait for the oldest window, and split it by slot; the first token of a new response counts.

        Raises:
          Diverged: The policy's logits are not finite.
        """
        assert self._unread, "nothing was dispatched"
        device_window, slot_B, fresh_B = self._unread.popleft()
        token_WB, logp_WB, active_B, choice_WBLk, kept_WBK = jax.device_get(device_window)
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
            kept_WK = None if kept_WBK is None else np.asarray(kept_WBK[span, row])
            numbers = tokens[row][span], logps[row][span]
            drawn.append(Drawn(int(slot_B[row]), *numbers, bool(active_B[row]), choice_WLk, kept_WK))
        self._cached_B[slot_B] += count_B
        self._active_B[slot_B] &= active_B  # one that was stopped since stays so
        return drawn


def insertion_of(placements: Sequence[Placement], *, rows: int, slots: int, most_stops: int) -> programs.Insertion:
    """Insertion of these responses, as host arrays of `rows` rows; rows that are left fill no slot.

    Args:
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
        drawn_B=np.array([sequence.request.drawn for sequence in sequences] + [0] * left, np.int32),
        limit_B=np.array([sequence.limit for sequence in sequences] + [0] * left, np.int32),
        stop_BE=stop_BE,
        settings=settings_of([sequence.sampling for sequence in sequences] + [Sampling()] * left),
    )
