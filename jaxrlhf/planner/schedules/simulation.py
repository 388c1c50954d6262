"""Simulation of generation and learning under a schedule, token by token.

A slot samples one token of its response per decode step, and takes the next response when its response ends. Token
counts decide when a round ends and which groups are postponed, as in a run. The cost model converts decode steps to
seconds, by the number of slots in use and the cache positions that they read.
"""

import heapq
import math
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from jaxrlhf.config.refusal import require
from jaxrlhf.planner.schedules.lengths import ResponseLengths


@dataclass(frozen=True)
class Schedule:
    """Schedule of generation and learning; all attributes except `apart` are settings of `Rollout`.

    Attributes:
      apart: Whether generation has separate devices and runs at the same time as learning.
    """

    staleness: int = 0
    over_provision: float = 1.0
    apart: bool = False

    def __post_init__(self) -> None:
        require(self.staleness >= 0, f"staleness must be 0 or more, got {self.staleness}")
        require(1 <= self.over_provision <= 2, f"over_provision must be from 1 to 2, got {self.over_provision}")
        least = 1 + self.apart
        require(
            self.over_provision == 1 or self.staleness >= least,
            f"over_provision={self.over_provision} postpones groups, but staleness={self.staleness} allows none; set "
            f"staleness to {least} or more" + " if generation has separate devices" * self.apart,
        )

    @property
    def lead(self) -> int:
        """Number of steps between the generation of responses and learning from them."""
        return self.staleness if self.over_provision == 1 else int(self.apart)

    @property
    def most_postponed(self) -> int:
        """Number of times that a group may be postponed."""
        return self.staleness - self.lead


@dataclass(frozen=True)
class StepTimes:
    """Seconds of the parts of a step, on devices that generate and devices that learn.

    Attributes:
      slots: Number of responses decoded at once, over all replicas.
      active_N: Numbers of slots in use, ascending.
      decode_s_N: Seconds of a decode step with this number of slots in use, without reading the cache.
      cache_s: Seconds to read one position of one slot's cache.
      capacities: Capacities of a cache in positions; a token reads the smallest capacity that holds its position.
      prefill_s: Coefficients of the prefill time: seconds of each round, per token of a sequence, and per squared
        number of tokens of a sequence.
      round_s: Seconds of a round besides prefill and decoding: sending or switching weights.
      learn_s: Seconds to prepare a step's experience and to update.
      prompt_tokens: Mean number of tokens of a prompt.
    """

    slots: int
    active_N: np.ndarray
    decode_s_N: np.ndarray
    cache_s: float
    capacities: tuple[int, ...]
    prefill_s: tuple[float, float, float]
    round_s: float
    learn_s: float
    prompt_tokens: float


class Interval(NamedTuple):
    """Interval of work: start and end, in seconds since the start of the run."""

    start_s: float
    end_s: float


@dataclass(frozen=True)
class Prediction:
    """Prediction for a schedule: means over steps, once the schedule has settled.

    Attributes:
      step_s: Seconds of a step.
      generation_idle: Share of the time in which the generating devices are idle.
      learning_idle: Share of the time in which the learning devices are idle.
      slots_in_use: Share of slots that sample a token, over all decode steps.
      age_mean: Mean age of a trained token, in policy versions.
      age_max: Age of the oldest trained token, in policy versions.
      recomputed: Tokens whose KV cache is computed again, divided by the trained tokens.
      rounds: Intervals of generation, from the first step on.
      updates: Intervals of learning, one for each step.
    """

    step_s: float
    generation_idle: float
    learning_idle: float
    slots_in_use: float
    age_mean: float
    age_max: int
    recomputed: float
    rounds: tuple[Interval, ...] = field(repr=False)
    updates: tuple[Interval, ...] = field(repr=False)


def simulate(
    schedule: Schedule,
    times: StepTimes,
    lengths: ResponseLengths,
    *,
    groups: int,
    copies: int,
    steps: int = 20,
    seed: int = 0,
) -> Prediction:
    """Simulate a schedule and return its prediction.

    Args:
      groups: P, number of groups that a step learns from.
      copies: G, number of responses of a group.
      steps: Number of steps to average over; some earlier steps are simulated too, but not counted.
    """
    rng, settling = np.random.default_rng(seed), 2 * (schedule.staleness + 1)
    generation, made = _Generation(schedule, times, lengths, groups, copies, rng), list[_Round]()
    rounds: list[Interval] = []
    updates: list[Interval] = []
    for step in range(settling + steps + schedule.lead):  # generation during the last counted step is work too
        # A round needs the weights of the update `lead + 1` steps before.
        weights_s = updates[step - schedule.lead - 1].end_s if step > schedule.lead else 0.0
        if not schedule.apart and updates:  # they take turns
            weights_s = updates[-1].end_s
        made.append(generation.round(step))
        start_s = max(weights_s, rounds[-1].end_s if rounds else 0.0)
        rounds.append(Interval(start_s, start_s + made[-1].seconds))
        learn_start_s = max(rounds[-1].end_s, updates[-1].end_s if updates else 0.0)
        updates.append(Interval(learn_start_s, learn_start_s + times.learn_s))
    window = Interval(updates[settling - 1].end_s, updates[settling + steps - 1].end_s)
    seconds, counted = window.end_s - window.start_s, made[settling : settling + steps]
    generates, learns = _busy_s(rounds, window), _busy_s(updates, window)
    if not schedule.apart:
        generates = learns = generates + learns
    tokens = sum(one.tokens for one in counted)
    age = sum(one.age_sum for one in counted) / tokens
    return Prediction(
        step_s=seconds / steps,
        generation_idle=max(0.0, 1 - generates / seconds),
        learning_idle=max(0.0, 1 - learns / seconds),
        slots_in_use=sum(one.sampled for one in counted) / (times.slots * sum(one.decode_steps for one in counted)),
        age_mean=schedule.lead + age,
        age_max=schedule.lead + max(one.age_max for one in counted),
        recomputed=sum(one.recomputed for one in counted) / tokens,
        rounds=tuple(rounds),
        updates=tuple(updates),
    )


class _Round(NamedTuple):
    """Round of generation.

    Attributes:
      sampled: Number of tokens sampled in the round.
      tokens: Number of tokens of the step's groups.
      age_sum: Sum of the ages of these tokens, in rounds.
      age_max: Age of the oldest of these tokens, in rounds.
      recomputed: Number of tokens whose KV cache is computed again.
    """

    seconds: float
    decode_steps: int
    sampled: int
    tokens: int
    age_sum: float
    age_max: int
    recomputed: float


class _Generation:
    """Groups in progress: one row per group in arrays [P, G], the most often postponed groups first."""

    def __init__(
        self,
        schedule: Schedule,
        times: StepTimes,
        lengths: ResponseLengths,
        groups: int,
        copies: int,
        rng: np.random.Generator,
    ) -> None:
        self._schedule, self._times, self._lengths, self._rng = schedule, times, lengths, rng
        self._groups, self._copies = groups, copies
        self._in_progress = math.ceil(groups * schedule.over_provision)
        self._length_PG = np.zeros((0, copies), np.int64)
        self._sampled_PG = np.zeros_like(self._length_PG)
        self._sampled_in_PG = np.zeros_like(self._length_PG)  # sum over tokens of the round that sampled the token
        self._first_PG = np.zeros_like(self._length_PG)  # round that sampled the first token
        self._postponed_P = np.zeros(0, np.int64)

    def round(self, number: int) -> _Round:
        """Generate until the groups of a step are complete, and remove these groups."""
        old = len(self._postponed_P)
        self._start(self._in_progress - old)
        left_PG = self._length_PG - self._sampled_PG
        start_B = _starts(left_PG.ravel(), self._times.slots)
        done_P = (start_B.reshape(left_PG.shape) + left_PG).max(axis=1)
        overdue_P = self._postponed_P >= self._schedule.most_postponed
        whole = self._schedule.over_provision == 1
        last = done_P.max() if whole else max(np.sort(done_P)[self._groups - 1], done_P[overdue_P].max(initial=0))
        chosen = np.lexsort((done_P, -self._postponed_P, done_P > last))[: self._groups]

        sampled_PG = np.clip(last - start_B.reshape(left_PG.shape), 0, left_PG)
        continued_PG = (self._sampled_PG > 0) & (left_PG > 0)
        again = self._times.prompt_tokens + self._sampled_PG[continued_PG]
        prompts = np.full(len(left_PG) - old, self._times.prompt_tokens)
        seconds = self._times.round_s + self._prefill_s(np.concatenate([prompts, again]))
        seconds += float(self._decode_s(start_B, sampled_PG.ravel(), int(last)).sum())

        self._first_PG = np.where((self._sampled_PG == 0) & (sampled_PG > 0), number, self._first_PG)
        self._sampled_PG = self._sampled_PG + sampled_PG
        self._sampled_in_PG = self._sampled_in_PG + number * sampled_PG
        tokens = int(self._sampled_PG[chosen].sum())
        age_sum = number * tokens - self._sampled_in_PG[chosen].sum()
        age_max = int(number - self._first_PG[chosen].min())
        self._keep(np.setdiff1d(np.arange(len(done_P)), chosen))
        return _Round(seconds, int(last), int(sampled_PG.sum()), tokens, float(age_sum), age_max, float(again.sum()))

    def _start(self, groups: int) -> None:
        new_PG = self._lengths.sample(self._rng, groups, self._copies)
        nothing_PG = np.zeros_like(new_PG)
        self._length_PG = np.concatenate([self._length_PG, new_PG])
        for name in ("_sampled_PG", "_sampled_in_PG", "_first_PG"):
            setattr(self, name, np.concatenate([getattr(self, name), nothing_PG]))
        self._postponed_P = np.concatenate([self._postponed_P, np.zeros(groups, np.int64)])

    def _keep(self, groups: np.ndarray) -> None:
        groups = groups[np.argsort(-self._postponed_P[groups], kind="stable")]
        for name in ("_length_PG", "_sampled_PG", "_sampled_in_PG", "_first_PG"):
            setattr(self, name, getattr(self, name)[groups])
        self._postponed_P = self._postponed_P[groups] + 1

    def _prefill_s(self, tokens_N: np.ndarray) -> float:
        fixed, linear, square = self._times.prefill_s
        return float(fixed * bool(len(tokens_N)) + linear * tokens_N.sum() + square * (tokens_N**2).sum())

    def _decode_s(self, start_B: np.ndarray, sampled_B: np.ndarray, steps: int) -> np.ndarray:
        """Return the seconds of each decode step of a round; sampled_B: number of tokens sampled in this round."""
        times = self._times
        before_B = times.prompt_tokens + self._sampled_PG.ravel()
        active_S, reads_S = np.zeros(steps + 1), np.zeros(steps + 1)
        stop_B = start_B + sampled_B
        held = 0
        for index, capacity in enumerate(times.capacities):
            passed = 0.0 if index == 0 else np.maximum(0, np.ceil(times.capacities[index - 1] - before_B))
            from_B = start_B + np.asarray(passed, np.int64)
            some = from_B < stop_B
            for counts_S, weight in ((reads_S, capacity - held), (active_S, 1))[: 2 if index == 0 else 1]:
                np.add.at(counts_S, from_B[some], weight)
                np.subtract.at(counts_S, stop_B[some], weight)
            held = capacity
        active_S, reads_S = (np.cumsum(counts_S)[:steps] for counts_S in (active_S, reads_S))
        return np.interp(active_S, times.active_N, times.decode_s_N) + times.cache_s * reads_S


def _starts(left_B: np.ndarray, slots: int) -> np.ndarray:
    """Return the decode step at which each response takes a slot, in order; complete responses take no slot."""
    start_B, wanting = np.zeros(len(left_B), np.int64), np.flatnonzero(left_B)
    if len(wanting) > slots:
        free_at = left_B[wanting[:slots]].tolist()
        heapq.heapify(free_at)
        for row in wanting[slots:]:
            start_B[row] = free_at[0]
            heapq.heapreplace(free_at, free_at[0] + int(left_B[row]))
    return start_B


def _busy_s(work: list[Interval], window: Interval) -> float:
    """Return the seconds of work within a window."""
    return sum(max(0.0, min(one.end_s, window.end_s) - max(one.start_s, window.start_s)) for one in work)
