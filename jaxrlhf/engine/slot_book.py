"""Host state of the slots, and the decode windows that were dispatched and not read yet.

A window is the tokens of one `decode` program call. The device's arrays have rows for the slots in use and a few more.
"""

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
from jaxrlhf.engine.sequence import WindowTokens


class Arrangement(NamedTuple):
    """New rows of the device's arrays in G replicas, gathered from existing rows.

    Attributes:
      row_GB: Source row of each new row, counted from the first row of the replica.
      continues_GB: False for new rows that are inactive: the source row's response ends here, or the row was added.
      slot_B: Slot of each new row.
    """

    row_GB: np.ndarray
    continues_GB: np.ndarray
    slot_B: np.ndarray


class _Unread(NamedTuple):
    """Dispatched window that was not read: the slot of each row, and the rows whose first token is unread too."""

    window: programs.Window
    slot_B: np.ndarray
    fresh_B: np.ndarray


class SlotBook:
    """Host state of the slots as of the last window that was read.

    Args:
      tokens_per_dispatch: Maximum number of tokens that a window adds to a slot.
      replicas: Number of equal parts that the slots are split into.

    Attributes:
      slot_B: Slot of each row of the device's arrays; empty at first.
    """

    def __init__(self, slots: int, tokens_per_dispatch: int, *, replicas: int) -> None:
        self._window_tokens, self._replicas = tokens_per_dispatch, replicas
        self._unread: deque[_Unread] = deque()
        self.slot_B = np.zeros(0, np.int64)
        # These arrays are indexed by slot, not by row.
        self._active_B, self._fresh_B = np.zeros(slots, bool), np.zeros(slots, bool)
        self._cached_B, self._limit_B = np.zeros(slots, np.int64), np.zeros(slots, np.int64)

    @property
    def taken_B(self) -> np.ndarray:
        """Mask of the slots whose response continues or was not read yet."""
        return self._active_B | self._fresh_B

    @property
    def active(self) -> int:
        """Number of taken slots."""
        return int(self.taken_B.sum())

    @property
    def unread(self) -> int:
        """Number of windows that were dispatched and not read."""
        return len(self._unread)

    @property
    def next_tokens_B(self) -> np.ndarray:
        """Upper bound on the cached tokens of each slot after the next window."""
        cached_B = self._cached_B + (self.unread + 1) * self._window_tokens
        return np.where(self.taken_B, np.minimum(cached_B, self._limit_B), 0)

    @property
    def outlasts(self) -> bool:
        """True if a response may continue after the unread windows."""
        return bool((self._cached_B + self.unread * self._window_tokens < self._limit_B)[self.taken_B].any())

    def start(self, slot: int, prompt_tokens: int, *, limit: int) -> None:
        """Give a slot to a response of at most `limit` tokens, whose first token was sampled and not read."""
        assert not self.taken_B[slot], f"slot {slot} is taken"
        self._fresh_B[slot] = True
        self._cached_B[slot] = prompt_tokens
        self._limit_B[slot] = prompt_tokens + limit - 1  # the last token is sampled and never run

    def dispatched(self, window: programs.Window) -> None:
        """Record a dispatched window."""
        self._unread.append(_Unread(window, self.slot_B, self._fresh_B[self.slot_B]))
        self._active_B |= self._fresh_B
        self._fresh_B[:] = False

    def forget(self) -> None:
        """Drop unread windows; no slot may be taken."""
        assert not self.taken_B.any(), "the window of an active slot has to be read"
        self._unread.clear()

    def stop(self, slots: Sequence[int]) -> None:
        """End responses that would have continued; unread windows may still contain tokens of these slots."""
        self._active_B[list(slots)] = self._fresh_B[list(slots)] = False

    def all_but(self, slots: Sequence[int]) -> Arrangement:
        """Return an arrangement with the present rows, in which the responses of some slots end."""
        row_GB = np.tile(np.arange(len(self.slot_B) // self._replicas, dtype=np.int32), (self._replicas, 1))
        return Arrangement(row_GB, ~np.isin(self.slot_B, slots).reshape(row_GB.shape), self.slot_B)

    def without_idle(self, kept_B: np.ndarray, counts: Sequence[int]) -> Arrangement | None:
        """Return the arrangement with the fewest rows for all taken and kept slots.

        None if that many rows are present already, or if no slot is taken or kept.

        Args:
          kept_B: Mask over slots: slots whose cache content is kept.
          counts: Allowed numbers of rows of a replica, ascending.
        """
        busy_GB = (self.taken_B | kept_B)[self.slot_B].reshape(self._replicas, -1)
        count = fit(int(busy_GB.sum(axis=1).max()), counts)
        if not busy_GB.any() or count >= busy_GB.shape[1]:
            return None
        row_GB = np.argsort(~busy_GB, axis=1, kind="stable")[:, :count].astype(np.int32)
        first_G1 = np.arange(self._replicas)[:, None] * busy_GB.shape[1]
        return Arrangement(row_GB, np.ones_like(row_GB, bool), self.slot_B[(row_GB + first_G1).reshape(-1)])

    def seat(self, slots: Sequence[int], kept_B: np.ndarray, counts: Sequence[int]) -> Arrangement | None:
        """Assign rows to further slots; only rows of slots that are not in use change their slot.

        Args:
          slots: Slots of new responses.
          kept_B: Mask over slots: slots whose cache content is kept.
          counts: Allowed numbers of rows of a replica, ascending.

        Returns:
          The arrangement with more rows, which are inactive; None if the present rows are enough.
        """
        needed_B = self.taken_B | kept_B
        needed_B[list(slots)] = True
        slot_GB, needed_GS = (values.reshape(self._replicas, -1) for values in (self.slot_B, needed_B))
        rows, (replicas, own) = slot_GB.shape[1], needed_GS.shape
        count = max(rows, fit(int(needed_GS.sum(axis=1).max()), counts))
        seated_GB = np.full((replicas, count), -1)
        seated_GB[:, :rows] = slot_GB
        for replica, seated_B in enumerate(seated_GB):
            needed = replica * own + np.flatnonzero(needed_GS[replica])
            missing = np.setdiff1d(needed, seated_B)
            seated_B[np.flatnonzero(~np.isin(seated_B, needed))[: len(missing)]] = missing
            others = np.setdiff1d(replica * own + np.arange(own), seated_B)
            seated_B[seated_B < 0] = others[: (seated_B < 0).sum()]
        if count == rows:
            self.slot_B = seated_GB.reshape(-1)
            return None
        here_GB = np.tile(np.arange(count) < rows, (replicas, 1))
        row_GB = np.where(here_GB, np.arange(count), 0).astype(np.int32)
        return Arrangement(row_GB, here_GB, seated_GB.reshape(-1))

    def read(self) -> list[WindowTokens]:
        """Wait for the oldest window, and split its tokens by slot; the first token of a new response is included.

        Raises:
          Diverged: The policy's logits are not finite.
        """
        assert self._unread, "nothing was dispatched"
        device_window, slot_B, fresh_B = self._unread.popleft()
        token_WB, logp_WB, active_B, choice_WBLk, kept_WBK, drafted_BD = jax.device_get(device_window)
        if not np.isfinite(logp_WB).all():
            raise Diverged(
                "the policy's logits are not finite: its weights diverged or overflow; resume from the last checkpoint "
                "with a lower learning rate (if this comes again at once it holds such weights too: delete it for the "
                "one before), and look at samples.jsonl"
            )
        count_B = (token_WB[1:] != programs.NO_TOKEN).sum(axis=0)
        tokens, logps = token_WB.T.tolist(), logp_WB.T.tolist()
        read = []
        for row in np.flatnonzero(self._active_B[slot_B]).tolist():
            # Row 0 was sampled at the insertion, or was read with the previous window.
            span = slice(0 if fresh_B[row] else 1, 1 + int(count_B[row]))
            choice_WLk = None if choice_WBLk is None else np.asarray(choice_WBLk[: count_B[row], row])
            kept_WK = None if kept_WBK is None else np.asarray(kept_WBK[span, row])
            numbers = tokens[row][span], logps[row][span]
            drafted = () if drafted_BD is None else tuple(drafted_BD[row].tolist())
            read.append(WindowTokens(int(slot_B[row]), *numbers, bool(active_B[row]), choice_WLk, kept_WK, drafted))
        self._cached_B[slot_B] += count_B
        self._active_B[slot_B] &= active_B  # a slot that was stopped since then stays stopped
        return read


def rows_of(slots: Sequence[int] | np.ndarray, slot_B: np.ndarray) -> np.ndarray:
    """Return the row of each slot in the device's arrays; the number of rows for a slot without a row.

    Args:
      slot_B: Slot of each row.
    """
    row_of = np.full(max(*slots, *slot_B, 0) + 1, len(slot_B), np.int32)
    row_of[slot_B] = np.arange(len(slot_B))
    return row_of[np.asarray(slots, np.int64)]


def insertion_of(placements: Sequence[Placement], slot_B: np.ndarray, rows: int, most_stops: int) -> programs.Insertion:
    """Build the insertion of these responses as host arrays of `rows` rows; padding rows are inserted nowhere.

    Args:
      slot_B: Slot of each row of the device's arrays.
      most_stops: E, maximum number of stop tokens of a response.
    """
    left = rows - len(placements)
    target_I = np.full(rows, len(slot_B), np.int32)
    target_I[: len(placements)] = rows_of([placement.slot for placement in placements], slot_B)
    sequences = [placement.sequence for placement in placements]
    stop_BE = np.full((rows, most_stops), -1, np.int32)
    for row, sequence in enumerate(sequences):
        stop_BE[row, : len(sequence.stop_tokens)] = sequence.stop_tokens
    return programs.Insertion(
        row_I=np.array([placement.row for placement in placements] + [0] * left, np.int32),
        target_I=target_I,
        seed_B=np.array([sequence.seed for sequence in sequences] + [0] * left, np.uint32),
        request_B=np.array([sequence.request.request_id for sequence in sequences] + [0] * left, np.uint32),
        sampled_B=np.array([sequence.request.sampled for sequence in sequences] + [0] * left, np.int32),
        limit_B=np.array([sequence.limit for sequence in sequences] + [0] * left, np.int32),
        stop_BE=stop_BE,
        settings=settings_of([sequence.sampling for sequence in sequences] + [Sampling()] * left),
    )
