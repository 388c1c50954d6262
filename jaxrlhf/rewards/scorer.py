"""Scorer of responses: a weighted sum of rewards."""

import logging
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from jaxrlhf import config
from jaxrlhf.batch import Scores
from jaxrlhf.config import Refusal
from jaxrlhf.rewards.parts import ENVIRONMENT, reward_function, source_parts
from jaxrlhf.rewards.pool import ExampleCalls, Packed, RewardPool, pack
from jaxrlhf.rewards.protocol import RESTART, Example, Failure, Function, RewardsFailing

ScoreTexts = Callable[[list[tuple[str, str, bool]]], Float[np.ndarray, "B"]]
"""Function that scores (prompt, response, finished) triples."""

BATCHES_AHEAD = 4
"""Number of latest batches whose responses from `start` are kept for `score`; older ones are dropped."""

PROGRESS_EVERY_S = 0.1

UNSCORABLE_BATCHES = 3
"""Number of consecutive batches without a scorable response after which the run may stop: nothing is learned."""

RUN = ""
"""Key of the run's own parts, which score the sources without parts of their own."""

logger = logging.getLogger(__name__)


class Scorer:
    """Scorer of responses with the reward parts of a configuration; functions run in a pool of processes.

    `start` calls the functions on a response as soon as the response exists. `score` then uses these results
    instead of calling the functions again. Results are looked up by all inputs of the functions: prompt, response,
    answer, record and question.

    Args:
      rewards: Parts and their weights. A part of weight 0 is only computed and reported.
      sources: Parts by name of a data source; these parts replace the parts of `rewards` for the source's responses.
      models: Functions that score texts, by `ModelReward.key`. The key of a whole-response model is its path.
      output: File that receives the output of reward functions; None is the standard error stream.

    Attributes:
      names: Names of the parts in logs and in `Scores.parts`, in the order of the configuration.
      failures: All failures of the latest `score`.
      counts: Number of failures of the latest `score` by cause.
      ahead: Number of function calls that had started before the latest `score`, and number of all its calls.

    Raises:
      Refusal: A function cannot be loaded, a pattern is not a regular expression, or a model is missing.
    """

    def __init__(
        self,
        rewards: config.Rewards,
        *,
        sources: Mapping[str, Sequence[config.RewardPart]] | None = None,
        models: Mapping[str, ScoreTexts] | None = None,
        output: Path | None = None,
    ) -> None:
        named = source_parts(rewards.parts, sources or {})
        self.names = [one.name for one in named]
        self.failures: list[Failure] = []
        self.counts: dict[str, int] = {}
        self.ahead = (0, 0)
        self._keys = {one.name: one.source or RUN for one in named}
        self._weights = {one.name: one.part.weight for one in named}
        self._most_failures, self._unscorable = rewards.failures_in_a_row, (0, 0)
        self._models: dict[str, ScoreTexts] = {}
        self._functions: list[Function] = []
        for name, part, _ in named:
            if isinstance(part, config.ModelReward):
                self._models[name] = _model(part, models or {})
            else:
                self._functions.append(reward_function(name, part, workers=rewards.workers))
        self._numbers = {
            key: [number for number, function in enumerate(self._functions) if self._keys[function.name] == key]
            for key in (RUN, *(sources or {}))
        }
        self._pool: RewardPool | None = None
        if self._functions:
            self._pool = RewardPool(
                self._functions,
                workers=rewards.workers,
                timeout_s=rewards.timeout_s,
                failures_in_a_row=rewards.failures_in_a_row,
                output=output,
            )
        # Only this thread accesses `_batches`, so that callers of `start` do not block.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="start rewards")
        self._batches: deque[dict[tuple[Packed, str], list[ExampleCalls]]] = deque([defaultdict(list)])

    @property
    def calls_functions(self) -> bool:
        """True if a part is a function; functions read records."""
        return self._pool is not None

    def close(self) -> None:
        """End the pool's processes."""
        self._thread.shutdown(cancel_futures=True)
        if self._pool:
            self._pool.close()

    def __enter__(self) -> "Scorer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def open_batch(self) -> None:
        """Start a new batch for the following calls of `start`."""
        if self._pool:
            self._thread.submit(self._open, self._pool)

    def start(
        self,
        prompt: str,
        response: Callable[[], str],
        answer: str | None,
        record: Mapping[str, Any],
        question: str | None = None,
        source: str = "",
    ) -> None:
        """Start the functions on a response of the open batch, and return at once.

        Args:
          response: Function that returns the text; called on a thread of the scorer.
          question: Prompt without its chat template.
          source: Name of the prompt's data source.
        """
        if self._pool:
            example = Example(prompt, "", answer, dict(record), question)
            self._thread.submit(self._start, self._pool, example, response, self._key(source))

    def score(
        self,
        prompts: Sequence[str],
        responses: Sequence[str],
        answers: Sequence[str | None],
        records: Sequence[Mapping[str, Any]],
        *,
        questions: Sequence[str | None] | None = None,
        sources: Sequence[str] | None = None,
        finished: Sequence[bool] | None = None,
        environment_B: np.ndarray | None = None,
        environment_failure: str = "",
        progress: Callable[[int, int], None] | None = None,
    ) -> Scores:
        """Score each response.

            score = sum over parts of weight * part

        A row is unscorable if a part of non-zero weight failed on it. Failures are logged in one line per part, and
        kept in `failures` and `counts` until the next call.

        Args:
          questions: Prompts without their chat template; None uses the prompts.
          sources: Name of each prompt's data source; None uses the run's parts for all.
          finished: bool per response, False if the response was truncated, for models; None is all True.
          environment_B: Reward of each episode's environment, NaN if it failed: a further part of weight 1.
          environment_failure: Line about one of the environments that failed, or empty.
          progress: Called now and then with the number of finished function calls and their total.

        Raises:
          RewardsFailing: Too many calls of a function fail in a row, or no response of this batch and of the batches
            before it could be scored.
        """
        ended = [True] * len(prompts) if finished is None else finished
        counts = [len(column) for column in (prompts, responses, answers, records, ended)]
        if len(set(counts)) > 1:
            raise ValueError(
                "scoring needs one prompt, response, answer, record and end per row, got "
                f"{', '.join(map(str, counts[:-1]))} and {counts[-1]}"
            )
        parts = {name: np.full(len(prompts), np.nan, np.float32) for name in self.names}
        self.failures = []
        columns = prompts, responses, answers, map(dict, records), questions or [None] * len(prompts)
        examples = [Example(*row) for row in zip(*columns, strict=True)]
        keys = [self._key(source) for source in sources or [RUN] * len(prompts)]
        if self._pool:
            self._run_functions(self._pool, examples, keys, parts, progress or (lambda done, total: None))
        for name, score_texts in self._models.items():
            parts[name] = self._run_model(name, score_texts, list(zip(prompts, responses, ended, strict=True)))
        self.failures.sort(key=lambda failure: (self.names.index(failure.part), failure.index))
        self.counts = dict(Counter(failure.cause for failure in self.failures))
        self._report(len(prompts))
        weights = self._weights
        scored = {name: np.array([key == self._keys[name] for key in keys], bool) for name in parts}
        if environment_B is not None:
            parts = {**parts, ENVIRONMENT: environment_B.astype(np.float32)}
            weights = {**weights, ENVIRONMENT: 1.0}
            scored[ENVIRONMENT] = np.ones(len(prompts), bool)
        scores = _combine(parts, weights, scored)
        self._count_unscorable(np.asarray(scores.scorable_B), environment_failure)
        return scores

    def _key(self, source: str) -> str:
        """Return the key of a source's parts: its name, or `RUN` if the source has no separate parts."""
        return source if source in self._numbers else RUN

    def _open(self, pool: RewardPool) -> None:
        self._batches.append(defaultdict(list))
        while len(self._batches) > BATCHES_AHEAD:
            pool.drop(calls for several in self._batches.popleft().values() for calls in several)

    def _start(self, pool: RewardPool, example: Example, response: Callable[[], str], key: str) -> None:
        # An error here may be ignored: `score` then makes the same calls and raises the error itself.
        packed = pack(replace(example, response=response()))
        self._batches[-1][packed, key] += pool.start([(packed, self._numbers[key])])

    def _take(self, pool: RewardPool, examples: list[Example], keys: list[str]) -> list[ExampleCalls]:
        """Return the calls for each example: calls that `start` made, or new calls."""
        packed = [(pack(example), key) for example, key in zip(examples, keys, strict=True)]
        found = [self._find(one) for one in packed]
        started = sum(call.started for calls in found if calls for call in calls)
        self.ahead = started, sum(len(self._numbers[key]) for key in keys)
        missing = [one for one, calls in zip(packed, found, strict=True) if calls is None]
        new = iter(pool.start((example, self._numbers[key]) for example, key in missing))
        return [next(new) if calls is None else calls for calls in found]

    def _find(self, packed: tuple[Packed, str]) -> ExampleCalls | None:
        return next((batch[packed].pop(0) for batch in self._batches if batch.get(packed)), None)

    def _run_functions(
        self,
        pool: RewardPool,
        examples: list[Example],
        keys: list[str],
        parts: dict[str, np.ndarray],
        progress: Callable[[int, int], None],
    ) -> None:
        shown_at = time.monotonic()
        calls = self._thread.submit(self._take, pool, examples, keys).result()
        total = self.ahead[1]
        for done, outcome in enumerate(pool.outcomes(calls), start=1):
            if outcome.failure is None:
                parts[self._functions[outcome.function].name][outcome.index] = outcome.value
            else:
                self.failures.append(outcome.failure)
            if done == total or time.monotonic() - shown_at > PROGRESS_EVERY_S:
                progress(done, total)
                shown_at = time.monotonic()

    def _run_model(self, name: str, score_texts: ScoreTexts, texts: list[tuple[str, str, bool]]) -> np.ndarray:
        score_B = np.array(score_texts(texts), np.float32)
        if score_B.shape != (len(texts),):
            raise ValueError(f"reward model {name!r} returned shape {score_B.shape} for {len(texts)} responses")
        for index in np.flatnonzero(~np.isfinite(score_B)):
            self.failures.append(Failure(name, int(index), "not-finite", f"returned {score_B[index]}"))
        return np.where(np.isfinite(score_B), score_B, np.nan).astype(np.float32)

    def _count_unscorable(self, scorable_B: np.ndarray, environment_failure: str) -> None:
        """Raise `RewardsFailing` after too many consecutive batches and responses without a scorable one."""
        batches, responses = self._unscorable
        self._unscorable = (0, 0) if scorable_B.any() else (batches + 1, responses + len(scorable_B))
        batches, responses = self._unscorable
        if not self._most_failures or batches < UNSCORABLE_BATCHES or responses < self._most_failures:
            return
        references = {function.name: f" ({function.reference})" for function in self._functions}
        last = {failure.part: failure for failure in self.failures if self._weights[failure.part]}
        causes = [f"environment, {environment_failure}"] if environment_failure else []
        causes += [
            f"reward {name!r}{references.get(name, '')}, {failure.cause}: {failure.detail}"
            for name, failure in last.items()
        ]
        raise RewardsFailing(
            f"none of the last {responses} responses, in {batches} batches, could be scored; the last time: "
            f"{'; '.join(causes)}. Give a number, 0 for a bad response, and {RESTART}"
        )

    def _report(self, rows: int) -> None:
        for name in self.names:
            failures = [failure for failure in self.failures if failure.part == name]
            if failures:
                causes = ", ".join(f"{cause} {n}" for cause, n in Counter(f.cause for f in failures).most_common())
                first = failures[0]
                logger.warning(
                    "reward %r failed on %d of %d responses (%s); first: response %d, %s: %s",
                    *(name, len(failures), rows, causes, first.index, first.cause, first.detail),
                )


def _combine(parts: dict[str, np.ndarray], weights: Mapping[str, float], scored: Mapping[str, np.ndarray]) -> Scores:
    """Return the weighted sum over the parts; `scored` are bool `[B]`, the rows that each part scores."""
    needed = [(weights[name], np.where(scored[name], part_B, 0.0)) for name, part_B in parts.items() if weights[name]]
    rows = len(next(iter(parts.values())))
    total_B = sum((weight * part_B.astype(np.float64) for weight, part_B in needed), np.zeros(rows))
    # NaN marks failures; a sum beyond the range of float32 is not a score either.
    scorable_B = np.abs(total_B) <= np.finfo(np.float32).max
    return Scores(
        score_B=np.where(scorable_B, total_B, 0.0).astype(np.float32), scorable_B=scorable_B, parts=dict(parts)
    )


def _model(part: config.ModelReward, models: Mapping[str, ScoreTexts]) -> ScoreTexts:
    if part.key not in models:
        given = ", ".join(map(repr, models)) or "none"
        raise Refusal(f"ModelReward {part.key!r} has no model: pass it in Scorer(..., models=); given: {given}")
    return models[part.key]
