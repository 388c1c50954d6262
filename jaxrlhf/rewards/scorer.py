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
from jaxrlhf.rewards.pool import Begun, Packed, RewardPool, pack
from jaxrlhf.rewards.protocol import Example, Failure, RewardsFailing

ScoreTexts = Callable[[list[tuple[str, str, bool]]], Float[np.ndarray, "B"]]
"""Function that scores (prompt, response, finished) triples."""

BATCHES_AHEAD = 4
"""Number of latest batches whose responses from `begin` are kept for `score`; older ones are dropped."""

PROGRESS_EVERY_S = 0.1

FRUITLESS_BATCHES = 3
"""Number of consecutive batches without a scorable response after which the run may stop: nothing is learned."""

logger = logging.getLogger(__name__)


class Scorer:
    """Scorer of responses with the reward parts of a configuration; functions run in a pool of processes.

    `begin` may start the functions on a response as soon as the response exists. `score` then uses these results
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
        self._source_of = {one.name: one.source for one in named}
        self._own = frozenset(sources or {})
        self.failures: list[Failure] = []
        self.counts: dict[str, int] = {}
        self.ahead = (0, 0)
        self._weights = [one.part.weight for one in named]
        self._most_failures, self._fruitless = rewards.failures_in_a_row, (0, 0)
        self._models: dict[str, ScoreTexts] = {}
        functions = []
        for name, part, _ in named:
            if isinstance(part, config.ModelReward):
                self._models[name] = _model(part, models or {})
            else:
                functions.append(reward_function(name, part, workers=rewards.workers))
        self._functions = [function.name for function in functions]
        self._references = {function.name: f" ({function.reference})" for function in functions}
        self._pool: RewardPool | None = None
        if functions:
            self._pool = RewardPool(
                functions,
                workers=rewards.workers,
                timeout_s=rewards.timeout_s,
                failures_in_a_row=rewards.failures_in_a_row,
                output=output,
            )
        # Only this thread accesses `_batches`, so that callers of `begin` do not block.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="begin rewards")
        self._batches: deque[dict[tuple[Packed, str], list[Begun]]] = deque([defaultdict(list)])

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
        """Start a new batch for the following calls of `begin`."""
        if self._pool:
            self._thread.submit(self._open, self._pool)

    def begin(
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
            self._thread.submit(self._begin, self._pool, example, response, source)

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
        asked = questions or [None] * len(prompts)
        columns = prompts, responses, answers, map(dict, records), asked
        examples = [Example(*row) for row in zip(*columns, strict=True)]
        names = list(sources or [""] * len(prompts))
        if self._pool:
            self._run_functions(self._pool, examples, names, parts, progress or (lambda done, total: None))
        for name, score_texts in self._models.items():
            parts[name] = self._run_model(name, score_texts, list(zip(prompts, responses, ended, strict=True)))
        self.failures.sort(key=lambda failure: (self.names.index(failure.part), failure.index))
        self.counts = dict(Counter(failure.cause for failure in self.failures))
        self._report(len(prompts))
        weights = self._weights
        if environment_B is not None:
            parts, weights = {**parts, ENVIRONMENT: environment_B.astype(np.float32)}, [*weights, 1.0]
        scores = _combine(parts, weights, [self._scores(name, names) for name in parts])
        self._count_fruitless(np.asarray(scores.scorable_B), environment_failure)
        return scores

    def _open(self, pool: RewardPool) -> None:
        self._batches.append(defaultdict(list))
        while len(self._batches) > BATCHES_AHEAD:
            pool.drop(begun for several in self._batches.popleft().values() for begun in several)

    def _scores(self, name: str, sources: Sequence[str]) -> np.ndarray:
        """Return bool `[B]`, rows that a part scores: rows of the part's source, else of sources without own parts."""
        own = self._source_of.get(name)
        if own is None:
            return np.array([name == ENVIRONMENT or source not in self._own for source in sources], bool)
        return np.array([source == own for source in sources], bool)

    def _numbers(self, source: str) -> list[int]:
        """Return the numbers of the functions that score a source."""
        return [number for number, name in enumerate(self._functions) if self._scores(name, [source])[0]]

    def _begin(self, pool: RewardPool, example: Example, response: Callable[[], str], source: str) -> None:
        # An error here may be ignored: `score` then makes the same calls and raises the error itself.
        packed = pack(replace(example, response=response()))
        begun = pool.begin([packed], lambda _: self._numbers(source))
        self._batches[-1][packed, self._scored_as(source)] += begun

    def _take(self, pool: RewardPool, examples: list[Example], sources: list[str]) -> list[Begun]:
        """Return the calls for each example: calls started by `begin`, or new calls."""
        packed = [pack(example) for example in examples]
        found = [self._find(one, self._scored_as(source)) for one, source in zip(packed, sources, strict=True)]
        under_way = sum(call.started for begun in found if begun for call in begun)
        numbers = {source: self._numbers(source) for source in set(sources)}
        self.ahead = under_way, sum(len(numbers[source]) for source in sources)
        missing = [n for n, begun in enumerate(found) if begun is None]
        new = iter(pool.begin([packed[n] for n in missing], lambda n: numbers[sources[missing[n]]]))
        return [next(new) if begun is None else begun for begun in found]

    def _scored_as(self, source: str) -> str:
        """Return the name of the source whose parts score a response; "" for the parts of the run."""
        return source if source in self._own else ""

    def _find(self, packed: Packed, scored_as: str) -> Begun | None:
        key = packed, scored_as
        for batch in self._batches:
            if key in batch:
                begun = batch[key].pop(0)
                if not batch[key]:
                    del batch[key]
                return begun
        return None

    def _run_functions(
        self,
        pool: RewardPool,
        examples: list[Example],
        sources: list[str],
        parts: dict[str, np.ndarray],
        progress: Callable[[int, int], None],
    ) -> None:
        shown_at = time.monotonic()
        begun = self._thread.submit(self._take, pool, examples, sources).result()
        total = self.ahead[1]
        for done, outcome in enumerate(pool.finish(begun), start=1):
            if outcome.failure is None:
                parts[self._functions[outcome.function]][outcome.index] = outcome.value
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

    def _count_fruitless(self, scorable_B: np.ndarray, environment_failure: str) -> None:
        """Raise `RewardsFailing` after too many consecutive batches and responses without a scorable one."""
        batches, responses = self._fruitless
        self._fruitless = (0, 0) if scorable_B.any() else (batches + 1, responses + len(scorable_B))
        batches, responses = self._fruitless
        if not self._most_failures or batches < FRUITLESS_BATCHES or responses < self._most_failures:
            return
        weight = dict(zip(self.names, self._weights, strict=True))
        last = {failure.part: failure for failure in self.failures if weight[failure.part]}
        causes = [f"environment, {environment_failure}"] if environment_failure else []
        causes += [
            f"reward {name!r}{self._references.get(name, '')}, {failure.cause}: {failure.detail}"
            for name, failure in last.items()
        ]
        raise RewardsFailing(
            f"none of the last {responses} responses, in {batches} batches, could be scored; the last time: "
            f"{'; '.join(causes)}. "
            "Give a number, 0 for a bad response, and start the run again, which goes on from its last checkpoint; "
            "rewards.failures_in_a_row says how many responses are too many, and 0 never stops a run"
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


def _combine(parts: dict[str, np.ndarray], weights: Sequence[float], scoring: Sequence[np.ndarray]) -> Scores:
    """Return the weighted sum over the parts that score each row."""
    columns = zip(weights, parts.values(), scoring, strict=True)
    needed = [(weight, np.where(scores_B, part_B, 0.0)) for weight, part_B, scores_B in columns if weight]
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
