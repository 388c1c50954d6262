"""Choice between one token and a draft: a draft is verified where the expected tokens per second are higher.

For d drafted tokens, a match of m tokens, and a rate a_m at which the policy samples drafted tokens after such matches,
a verification is expected to give a row

    1 + a_m + a_m^2 + ... + a_m^d    tokens

The rates are counted in every window, also where no draft was verified: the tokens that were sampled are compared with
the draft that there was. The seconds of a call are those of the engine's own calls with as many rows. So speculation
turns itself off where it loses, and on again, and measures nothing apart.

A verification of another size is another program to compile. The program is compiled once it would have saved the
seconds that such a program took to compile. Responses that gain nothing from drafts therefore compile nothing.

Timings decide only how many tokens a call samples, never which (`verification`). They differ between two runs, and so
may the last digits of log-probabilities.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any, Literal, NamedTuple

import numpy as np
from jax.sharding import Mesh

from jaxrlhf.engine.buckets import Shape
from jaxrlhf.engine.compiled import Compiled, Size
from jaxrlhf.engine.constraints import constrained
from jaxrlhf.engine.programs import NO_TOKEN, decode
from jaxrlhf.engine.sequence import SequenceState, WindowTokens
from jaxrlhf.engine.slot_book import SlotBook
from jaxrlhf.engine.speculation.drafts import BY_MTP, MOST_MATCHED, NO_DRAFT, Draft, DraftIndex
from jaxrlhf.engine.speculation.verification import verify
from jaxrlhf.models import AnyModel, Execution
from jaxrlhf.models.config import ModelConfig

WIDTHS = (4, 8)
"""Tokens of a row that one verification runs: the newest token, and at most all others drafted."""

MOST_TOKENS = {"cpu": 32}
MOST_TOKENS_ELSEWHERE = 256
"""Most tokens of a verification over all rows of a replica, by platform; more are bound by arithmetic, not by weights.

No program is compiled for more, so that large batches compile and draft nothing.
"""

FEWEST_SLOTS = {"cpu": 2}
"""Fewest slots of a replica that run together with drafts, by platform, where arithmetic bounds even few tokens: rows
without a response then cost as much as drafted tokens."""

LEAST_GAIN = 1.05
"""Smallest expected ratio of tokens per second for which a draft is verified."""

SHORT_WINDOW = 4
"""Maximum number of tokens of a window without drafts, while drafts pay: soon there may be a draft again."""

_LEAST_MEAN_GAIN = 1.02
_NEWEST_SHARE = 0.1
_COST_SHARE = 0.5
"""Shares of the newest value in the running means of the gain and of the seconds of a call."""

_KEPT_COST = 0.995
"""Factor of the seconds of a verification that did not pay, so that it is measured again: there are bad moments."""

_MOST_TRIALS = 256.0
"""Number of drafted tokens after which the counts of a rate are halved, so that rates follow the policy."""


@dataclass
class SpeculationCounts:
    """Counters of an engine's speculation since its start, or since they were last taken.

    Attributes:
      calls: Number of verifications.
      rows: Number of responses in progress, summed over verifications.
      tokens: Number of tokens that verifications sampled.
      drafted, accepted: Number of drafted tokens that were compared with a sample, and number of equal ones.
    """

    calls: int = 0
    rows: int = 0
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0


class NextCall(NamedTuple):
    """Next call of the engine: a program, its name, further sizes of its name, and the arguments after the slots."""

    name: str
    program: Callable[..., Any]
    sizes: tuple[str | int, ...]
    arguments: tuple[Any, ...]


class _Dispatched(NamedTuple):
    """Dispatched call: rows, tokens of a row (1 without drafts), and the number of programs compiled before it.

    Attributes:
      start_s: Start of the call; None if its seconds are not those of the call alone.
    """

    rows: int
    width: int
    start_s: float | None
    compiled: int


def obstacle(shape: Shape) -> str | None:
    """Return the reason why an engine cannot verify drafts; None if there is none."""
    config = shape.config
    if not isinstance(config, ModelConfig):
        return "a user-defined model runs one token of a slot at a time"
    if config.linear is not None and shape.execution.pipeline is not None:
        return "over pipeline stages, states of linear attention are not rolled back to the last accepted token"
    if shape.tokens_per_dispatch < WIDTHS[0]:
        return f"decode_tokens_per_dispatch={shape.tokens_per_dispatch} is below the {WIDTHS[0]} tokens of a draft"
    return None


def with_mtp(
    wanted: Literal["auto"] | None, config: AnyModel, execution: Execution, mesh: Mesh, *, replicas: int
) -> Execution:
    """Return the execution in which the model's layer for the second next token, if it has one, drafts for few slots.

    Pages and pipeline stages have no place for the layer's keys and values.

    Args:
      wanted: Setting `rollout.speculation`.
    """
    mtp = isinstance(config, ModelConfig) and config.mtp
    if wanted is None or not mtp or execution.pages_kernel is not None or execution.pipeline is not None:
        return execution
    most = MOST_TOKENS.get(mesh.devices.flat[0].platform, MOST_TOKENS_ELSEWHERE) // WIDTHS[0]
    return replace(execution, mtp_slots=most * replicas)


class Speculation:
    """Speculation of an engine: drafts of its rows, what they are worth, and the choice of the next call.

    Args:
      wanted: Setting `rollout.speculation`.
      compiled: The engine's programs.
      clock: Function that returns seconds.

    Attributes:
      off: Reason why no drafts are verified; None if they may be.
      widths: Numbers of tokens of a row that a verification may run; empty if off.
      admits_ahead: False if only one call may be in flight.
      fewest_slots: Fewest slots of a replica that run together; None is the engine's own number.
      counts: Counters; see `take_counts`.
    """

    def __init__(
        self,
        wanted: Literal["auto"] | None,
        compiled: Compiled,
        *,
        platform: str,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        shape, self._compiled = compiled.shape, compiled
        self.off = "rollout.speculation=None" if wanted is None else obstacle(shape)
        self.widths = () if self.off else tuple(width for width in WIDTHS if width <= shape.tokens_per_dispatch)
        self.fewest_slots = FEWEST_SLOTS.get(platform) if self.widths else None
        self._most_tokens = MOST_TOKENS.get(platform, MOST_TOKENS_ELSEWHERE) * shape.replicas
        self._clock, self.counts, self._index = clock, SpeculationCounts(), DraftIndex()
        self._window_tokens = shape.tokens_per_dispatch
        # The slack of a ring is for the tokens of two calls, and a verification writes past the last accepted token.
        self.admits_ahead = not self.widths or shape.execution.ring_entries is None
        self._drafts: dict[int, Draft] = {}  # by slot; every running response that was read has one
        self._seconds: dict[tuple[int, int], float] = {}
        # Seconds of one more token in a verification, in passes of single tokens.
        self._token_share = 1 / self._most_tokens
        self._saved_s: defaultdict[tuple[Size, ...], float] = defaultdict(float)  # by programs that are not compiled
        self._hits, self._trials = np.full(MOST_MATCHED + 1, 1.0), np.full(MOST_MATCHED + 1, 2.0)
        self._call: _Dispatched | None = None
        self._mean_gain, self._capacity = 1.0, 0

    @property
    def pays(self) -> bool:
        """True if drafts were worth verifying of late, so that the next window waits for the tokens of the last."""
        return self._mean_gain > _LEAST_MEAN_GAIN or (self._call is not None and self._call.width > 1)

    @property
    def rates(self) -> np.ndarray:
        """Rates at which the policy sampled drafted tokens of late, verified or not, by the length of the match."""
        return self._hits / self._trials

    def take_counts(self) -> SpeculationCounts:
        """Return the counters and start them again at 0."""
        taken, self.counts = self.counts, SpeculationCounts()
        return taken

    def free(self) -> None:
        """Drop all running responses; earlier responses stay."""
        self._drafts.clear()
        self._index.clear_running()
        self._call = None

    def next_call(self, book: SlotBook, bits_BU: np.ndarray | None, *, capacity: int) -> NextCall:
        """Return the call that is dispatched now: a verification of drafts, or a window of `decode` without drafts.

        Args:
          bits_BU: Masks of `SlotConstraints.next`; every response then samples one token, and no draft is verified.
          capacity: Number of tokens that the cache of a slot holds.
        """
        self._capacity = capacity
        if not self.widths:
            return NextCall("decode", decode, constrained(bits_BU), (bits_BU,))
        draft_BD = self._chosen(book) if bits_BU is None else None
        if draft_BD is not None:
            return NextCall("verify", verify, draft_BD.shape[1:], (draft_BD,))
        most = np.int32(SHORT_WINDOW if self.pays else self._window_tokens)
        return NextCall("decode", decode, constrained(bits_BU), (bits_BU, most))

    def _chosen(self, book: SlotBook) -> np.ndarray | None:
        """Return the drafts to verify, `[B, D]`, `NO_TOKEN` where there are fewer; None to sample without drafts."""
        rows, alone = len(book.slot_B), not book.unread
        width = self._width(rows, book.active) if alone else 1
        # The first window of a response waits for its prompt, and overlapping windows for each other.
        measured = alone and len(self._drafts) == book.active
        start_s = self._clock() if measured else None
        self._call = _Dispatched(rows, width, start_s, len(self._compiled)) if alone else None
        if width == 1:
            return None
        draft_BD = np.full((rows, width - 1), NO_TOKEN, np.int32)
        for row, slot in enumerate(book.slot_B.tolist()):
            tokens = self._drafts.get(slot, NO_DRAFT).tokens[: width - 1]
            draft_BD[row, : len(tokens)] = tokens
        return draft_BD

    def read(self, read: Sequence[tuple[SequenceState, WindowTokens]], *, rows: int) -> None:
        """Take the tokens of the window that was read: count hits of drafts and seconds, and draft again.

        Args:
          rows: Number of rows of the next call.
        """
        if not self.widths:
            return
        self._measure([len(window.tokens) for _, window in read])
        most = max((width for width in self.widths if rows * width <= self._most_tokens), default=1) - 1
        for sequence, window in read:
            slot, tokens = window.slot, window.tokens
            if slot not in self._drafts:
                self._start(sequence, slot)
            self._count(self._drafts[slot], tokens)
            self._index.extend(slot, tokens)
            left = sequence.limit - sequence.request.sampled - len(sequence.tokens) - 1
            self._drafts[slot] = NO_DRAFT
            if window.active and most:
                found = self._index.draft(slot, min(most, left)), Draft(window.drafted[: min(most, left)], BY_MTP)
                self._drafts[slot] = max(found, key=lambda draft: self._expected(draft, most))
        self._call = None
        gain = max([1.0, *self._compiled_gains(rows, len(read)).values()])
        self._mean_gain += (_NEWEST_SHARE if most else 1.0) * (gain - self._mean_gain)

    def end(self, slot: int) -> None:
        """Take the end of a slot's response."""
        self._drafts.pop(slot, None)
        self._index.end(slot)

    def _start(self, sequence: SequenceState, slot: int) -> None:
        """Start a response; tokens that were sampled earlier are not a part of its prompt."""
        prompt, sampled = sequence.request.prompt_tokens, sequence.request.sampled
        self._index.start(slot, prompt[: len(prompt) - sampled])
        self._index.extend(slot, prompt[len(prompt) - sampled :])
        self._drafts[slot] = NO_DRAFT

    def _width(self, rows: int, active: int) -> int:
        """Return the number of tokens of a row that the next call runs: 1 is a window without drafts."""
        gains, ready = self._gains(rows, active), self._compiled_gains(rows, active)
        width = max(ready, key=ready.__getitem__, default=1)
        if ready.get(width, 1.0) < LEAST_GAIN:
            if (rows, width) in self._seconds:
                self._seconds[rows, width] *= _KEPT_COST
            width = 1
        gain = ready[width] if width > 1 else 1.0
        best = max(gains, key=gains.__getitem__, default=1)
        if best == 1 or gains[best] < LEAST_GAIN or gains[best] <= gain:
            return width
        program = self._program(rows, best)
        passes = self._window_tokens if width == 1 else 1
        self._saved_s[program] += passes * self._pass_s(rows, width) * (1 - gain / gains[best])
        return best if self._saved_s[program] >= self._compilation_s else width

    def _program(self, rows: int, width: int) -> tuple[Size, ...]:
        return "verify", rows, self._capacity, width - 1

    @property
    def _compilation_s(self) -> float:
        """Seconds in which a verification is likely to be compiled."""
        seconds = self._compiled.seconds.items()
        return max((each for program, each in seconds if program[0] in ("decode", "verify")), default=0.0)

    def _pass_s(self, rows: int, width: int) -> float:
        """Return the seconds of a forward pass: measured, or those of one token and of the tokens beside it."""
        estimate = self._seconds[rows, 1] * (1 + self._token_share * rows * (width - 1))
        return self._seconds.get((rows, width), estimate)

    def _compiled_gains(self, rows: int, active: int) -> dict[int, float]:
        """Return `_gains` of the verifications that are compiled."""
        gains = self._gains(rows, active).items()
        return {width: gain for width, gain in gains if self._program(rows, width) in self._compiled.programs}

    def _gains(self, rows: int, active: int) -> dict[int, float]:
        """Return the expected tokens per second by the width of a verification, relative to single tokens."""
        widths = [width for width in self.widths if rows * width <= self._most_tokens]
        if (rows, 1) not in self._seconds or not any(draft.tokens for draft in self._drafts.values()):
            return {}

        def gain(width: int) -> float:
            tokens = active + sum(self._expected(draft, width - 1) for draft in self._drafts.values())
            return tokens / active * self._pass_s(rows, 1) / self._pass_s(rows, width)

        return {width: gain(width) for width in widths}

    def _expected(self, draft: Draft, most: int) -> float:
        """Return the expected number of accepted tokens of a draft."""
        rate = self.rates[draft.matched]
        return float(sum(rate**place for place in range(1, min(most, len(draft.tokens)) + 1)))

    def _count(self, draft: Draft, tokens: Sequence[int]) -> None:
        """Count the drafted tokens that were sampled, up to the first that differs."""
        pairs = list(zip(draft.tokens, tokens, strict=False))
        hits = next((place for place, (drafted, token) in enumerate(pairs) if drafted != token), len(pairs))
        trials = min(hits + 1, len(pairs))
        self._hits[draft.matched] += hits
        self._trials[draft.matched] += trials
        if self._trials[draft.matched] > _MOST_TRIALS:
            self._hits[draft.matched] /= 2
            self._trials[draft.matched] /= 2
        if self._call is not None and self._call.width > 1:
            self.counts.drafted += trials
            self.counts.accepted += hits

    def _measure(self, sampled: Sequence[int]) -> None:
        """Count the call that was read, and take its seconds unless a program was compiled meanwhile."""
        if self._call is None:
            return
        rows, width, start_s, before = self._call
        if width > 1:
            self.counts.calls += 1
            self.counts.rows += len(sampled)
            self.counts.tokens += sum(sampled)
        passes = 1 if width > 1 else max(sampled, default=0)
        if start_s is not None and passes and before == len(self._compiled):
            seconds = (self._clock() - start_s) / passes
            old = self._seconds.setdefault((rows, width), seconds)
            self._seconds[rows, width] = old + _COST_SHARE * (seconds - old)
            if width > 1 and (rows, 1) in self._seconds:
                self._token_share = max(0.0, seconds / self._seconds[rows, 1] - 1) / (rows * (width - 1))
