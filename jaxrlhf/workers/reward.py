"""Reward worker: scores responses with functions in a process pool and with reward models."""

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from math import nan
from typing import Any

import numpy as np

from jaxrlhf.batch import Problem, RolloutBatch, Scores
from jaxrlhf.batching.transfer_protocol import DP_PROTO, RankCoordinates, worker_method
from jaxrlhf.conversations.images import load_images
from jaxrlhf.data.images import with_pictures
from jaxrlhf.engine import Completion
from jaxrlhf.episode import FAILURES, TRUNCATIONS, EpisodeRecord, Message
from jaxrlhf.rewards.scorer import Scorer
from jaxrlhf.workers.model import Metrics, Progress
from jaxrlhf.workers.sampler import CompletionListener


class Reward:
    """Worker that scores responses and episodes.

    Functions may start as soon as a response ends, while other responses are generated. Models score all responses
    together in `compute_reward`.

    Args:
      place: Coordinates among the scoring processes; each process scores alone.
      decode: Function from token ids to text, without special tokens.
    """

    def __init__(
        self, scorer: Scorer, place: RankCoordinates, decode: Callable[[Sequence[int]], str], progress: Progress
    ) -> None:
        self.place = place
        self._scorer, self._progress = scorer, progress
        self._text = cache(decode)  # decodes each response once; cleared after scoring and before a rollout
        self._ahead = np.zeros(2)

    def listen(self) -> CompletionListener:
        """Open a new rollout, and return the listener for its responses."""
        self._text.cache_clear()
        self._scorer.open_batch()
        return self._start

    def _start(self, problem: Problem, completion: Completion) -> None:
        text = partial(self._text, completion.tokens)
        context = problem.question, problem.source
        self._scorer.start(problem.prompt, text, problem.answer, _shown(problem), *context)

    def take_metrics(self) -> Metrics:
        """Return the fraction of function calls that had started before `compute_reward`, since the last metrics."""
        (in_progress, calls), self._ahead = self._ahead, np.zeros(2)
        return {"reward/overlapped_fraction": float(in_progress / calls)} if calls else {}

    @worker_method(DP_PROTO, part="reward")
    def compute_reward(self, problems: Sequence[Problem], rollout: RolloutBatch) -> Scores:
        """Score every response, or every episode by its environment's reward and the parts' scores of its last reply.

        Functions get a whole episode in the record, as `episode`. A failed episode is unscorable.
        """
        if rollout.episodes is not None:
            return self._score_episodes(problems, rollout.episodes.records)
        responses = response_texts(rollout, self._text)
        rows = _repeated(problems, len(responses))
        finished = (~np.asarray(rollout.truncated_B)).tolist()
        scores = self._scored(rows, responses, [_shown(row) for row in rows], finished)
        self._text.cache_clear()
        self._ahead += self._scorer.ahead
        return scores

    def _score_episodes(self, problems: Sequence[Problem], episodes: Sequence[EpisodeRecord]) -> Scores:
        show = load_images if self._scorer.calls_functions else list  # models read no images
        dict_E = [_as_dict(one, show(one.messages)) for one in episodes]
        paid_E = [nan if one.stop in FAILURES else one.environment_reward or 0.0 for one in episodes]
        failed = [f"{one.stop}: {one.failure}" for one in episodes if one.stop in FAILURES]
        each = _repeated(problems, len(episodes))
        shown = [{**_shown(problem), "episode": episode} for problem, episode in zip(each, dict_E, strict=True)]
        answers, finished = [one.answer for one in episodes], [one.stop not in TRUNCATIONS for one in episodes]
        paid, why = np.array(paid_E, np.float32), failed[-1] if failed else ""
        return self._scored(each, answers, shown, finished, environment_B=paid, environment_failure=why)

    def _scored(
        self,
        problems: Sequence[Problem],
        responses: Sequence[str],
        shown: Sequence[Mapping[str, Any]],
        finished: Sequence[bool],
        environment_B: np.ndarray | None = None,
        environment_failure: str = "",
    ) -> Scores:
        return self._scorer.score(
            [problem.prompt for problem in problems],
            responses,
            [problem.answer for problem in problems],
            shown,
            questions=[problem.question for problem in problems],
            sources=[problem.source for problem in problems],
            finished=finished,
            environment_B=environment_B,
            environment_failure=environment_failure,
            progress=partial(self._progress, "reward"),
        )


def _repeated(problems: Sequence[Problem], count: int) -> list[Problem]:
    """Return the problem of each of `count` responses, an equal number for each problem."""
    return [problem for problem in problems for _ in range(count // len(problems))]


def _as_dict(episode: EpisodeRecord, messages: Sequence[Message]) -> dict[str, Any]:
    """Return the episode as a dict for reward functions."""
    calls = [{"name": call.name, "failure": call.failure} for turn in episode.turns for call in turn.calls]
    return {
        "messages": messages,
        "stop": episode.stop,
        "turns": len(episode.turns),
        "calls": calls,
        "environment_reward": episode.environment_reward,
    }


def _shown(problem: Problem) -> Mapping[str, Any]:
    """Return the record for reward functions, with the images of the prompt."""
    return with_pictures(problem.record, problem.images)


def response_texts(rollout: RolloutBatch, decode: Callable[[Sequence[int]], str]) -> list[str]:
    """Decode the responses of a rollout to text."""
    tokens, mask = rollout.sequences.token_BT, rollout.sequences.mask_BT
    return [decode(tuple(row[chosen].tolist())) for row, chosen in zip(tokens, mask, strict=True)]
