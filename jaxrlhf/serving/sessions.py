"""Agent sessions: every call of an episode is attributed to the episode and recorded by the server."""

import math
import secrets
import threading
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from jaxrlhf.config import Sampling
from jaxrlhf.config.serving import SessionLimits
from jaxrlhf.conversations import TokenSequence
from jaxrlhf.engine import Completion
from jaxrlhf.episode import Reply
from jaxrlhf.serving.call_tree import CallTree, Fork, RecordedCall
from jaxrlhf.serving.errors import ApiError, invalid
from jaxrlhf.serving.served import ServedModel, hash_of

REMEMBERED_ENDED = 10_000
"""Number of ended sessions that are remembered; late calls of older sessions count as calls of unknown sessions."""


@dataclass(frozen=True)
class RecordedEpisode:
    """Episode as recorded by the server.

    Attributes:
      sequences: Training rows; every sampled token has mask 1 in exactly one row.
      replies: Parsed replies, by sequence and turn number; None for a text completion.
      rewards: Rewards posted for turns, by sequence and turn number.
      reward: Reward posted for the episode; None if no reward was posted.
      calls: Number of sampled choices; 0 for an agent without calls.
      forks: Number of sequences that look like a continuation of an earlier call but are not, by cause.
      refused: Number of requests refused by a limit, by the name of the limit.
    """

    sequences: tuple[TokenSequence, ...]
    replies: tuple[tuple[Reply | None, ...], ...]
    rewards: Mapping[tuple[int, int], float]
    reward: float | None
    calls: int
    forks: Counter[Fork]
    refused: Counter[str]


class ServedSession:
    """Open session of an episode, which serves the calls of the episode's agent.

    Attributes:
      base_url, api_key: Address and key for the agent's clients; either identifies the session of a call.
      tree: Tree of the episode's calls; use it only under `lock`.
    """

    def __init__(
        self,
        episode: Hashable,
        seed: int,
        limits: SessionLimits,
        tree: CallTree,
        base_url: str,
        *,
        sampling: Sampling | None,
    ) -> None:
        self.episode, self.seed, self.limits, self.tree, self.sampling = episode, seed, limits, tree, sampling
        self.session_id = secrets.token_urlsafe(16)
        self.base_url, self.api_key = f"{base_url}/s/{self.session_id}/v1", f"sk-{self.session_id}"
        self.lock = threading.Lock()
        self.answers: dict[str, list[RecordedCall]] = {}
        self.reward: float | None = None
        self.refused: Counter[str] = Counter()
        self._calls = self._tokens = 0
        self._closed = False
        self._futures: list[list[Future[Completion]]] = []
        self._prompt_counts: Counter[tuple[int, ...]] = Counter()
        self._cached: set[int] = set()

    def check_open(self) -> None:
        """Raise `ApiError` if the episode has ended."""
        if self._closed:
            raise _ended()

    def count_refusal(self, limit: str) -> None:
        """Count a request that a limit refuses."""
        with self.lock:
            self.refused[limit] += 1

    def start_choices(self, prompt: tuple[int, ...], choices: int) -> list[int]:
        """Start choices of a prompt; return their request ids, which seed the sampling together with `seed`.

        An id is a function of the episode, the prompt, and how often the prompt was requested before.

        Raises:
          ApiError: The episode has ended or reached a limit.
        """
        with self.lock:
            self.check_open()
            for what, limit, wanted in (
                ("calls", self.limits.calls, self._calls + choices),
                ("tokens", self.limits.tokens, self._tokens + 1),
            ):
                if limit is not None and wanted > limit:
                    self.refused[what] += 1
                    message = f"the episode's limit of {limit} {what} is reached"
                    raise ApiError(message, status=403, code=f"limit_{what}")
            self._calls += choices
            first = self._prompt_counts[prompt]
            self._prompt_counts[prompt] += choices
            ids = [hash_of(self.episode, prompt, first + copy) for copy in range(choices)]
            self._cached.update(ids)
            return ids

    @contextmanager
    def in_progress(self) -> Iterator[list[Future[Completion]]]:
        """Yield a list for the futures of a request; the futures are cancelled when the episode ends."""
        futures: list[Future[Completion]] = []
        with self.lock:  # otherwise a `close` just before would miss these futures
            self.check_open()
            self.tree.parallel |= any(not future.done() for others in self._futures for future in others)
            self._futures.append(futures)
        try:
            yield futures
        finally:
            self._futures.remove(futures)

    def tokens_per_choice(self, choices: int) -> int | None:
        """Return the token limit of each of `choices` choices; None is unlimited."""
        left = None if self.limits.tokens is None else max(1, (self.limits.tokens - self._tokens) // choices)
        limits = [n for n in (left, self.limits.call_tokens) if n is not None]
        return min(limits, default=None)

    def record(self, answer_id: str, calls: list[RecordedCall]) -> None:
        """Record the calls of a complete answer, which are in `tree` already."""
        self.answers[answer_id] = calls
        self._tokens += sum(len(call.logps) for call in calls)

    def set_reward(self, body: Any) -> None:
        """Set the `reward` of a request body, for the episode or for the answer named by `response_id`."""
        reward = body.get("reward") if isinstance(body, dict) else None
        if not isinstance(reward, int | float) or isinstance(reward, bool) or not math.isfinite(reward):
            raise invalid("reward must be a finite number", "reward")
        with self.lock:
            self.check_open()
            answer = body.get("response_id")
            if answer is None:
                self.reward = float(reward)
            elif not isinstance(answer, str) or answer not in self.answers:
                raise ApiError(
                    f"no answer {answer!r} in this session", status=404, code="no_such_response", param="response_id"
                )
            else:
                for call in self.answers[answer]:
                    call.reward = float(reward)

    def close(self) -> tuple[RecordedEpisode, set[int]]:
        """End the episode; return its record, and the ids of requests whose KV cache was kept."""
        with self.lock:
            self._closed = True
        for future in [future for futures in list(self._futures) for future in list(futures)]:
            future.cancel()
        with self.lock:
            sequences, paths = self.tree.sequences()
            places: dict[RecordedCall, tuple[int, int]] = {}
            for row, path in enumerate(paths):
                for turn, call in enumerate(path):
                    places.setdefault(call, (row, turn))
            rewards = {place: call.reward for call, place in places.items() if call.reward is not None}
            replies = tuple(tuple(call.reply for call in path) for path in paths)
            counts = len(self.tree.calls), self.tree.forks, self.refused
            return RecordedEpisode(sequences, replies, rewards, self.reward, *counts), self._cached


def _ended() -> ApiError:
    return ApiError("the episode has ended; its session takes no calls", status=409, code="session_closed")


class SessionBook:
    """Open sessions, and ended sessions that reject late calls.

    Args:
      address: Address of the server, such as `http://127.0.0.1:8000`.
      sampling: Sampling settings of every call, overriding the settings of requests; None uses the requests'.
    """

    def __init__(self, model: ServedModel, address: str, *, sampling: Sampling | None) -> None:
        self._model, self._address, self._sampling = model, address, sampling
        self._by_id: dict[str, ServedSession] = {}
        self._by_episode: dict[Hashable, ServedSession] = {}
        self._ended: dict[str, None] = {}
        self._lock = threading.Lock()

    def open(
        self,
        episode: Hashable,
        seed: int,
        limits: SessionLimits | None = None,
        *,
        history: Literal["as_sampled", "as_templated"] = "as_sampled",
    ) -> tuple[str, str]:
        """Start an episode; return base URL and API key for its clients. Thread-safe.

        Args:
          episode: Name of the episode; with the seed it determines the sampling.

        Raises:
          ValueError: The episode is open.
        """
        tree = CallTree(self._model.form, history=history)
        session = ServedSession(episode, seed, limits or SessionLimits(), tree, self._address, sampling=self._sampling)
        with self._lock:
            if episode in self._by_episode:
                raise ValueError(f"episode {episode!r} is open already")
            self._by_id[session.session_id] = self._by_episode[episode] = session
        return session.base_url, session.api_key

    def close(self, episode: Hashable) -> RecordedEpisode:
        """End an episode: open calls are cancelled, later calls refused. Thread-safe.

        Raises:
          KeyError: No such episode is open.
        """
        with self._lock:
            session = self._by_episode.pop(episode)
            del self._by_id[session.session_id]
            self._ended[session.session_id] = None
            while len(self._ended) > REMEMBERED_ENDED:
                del self._ended[next(iter(self._ended))]
        recorded, cached = session.close()
        for request_id in cached:
            self._model.service.release(request_id)
        return recorded

    def find(self, session_id: str) -> ServedSession | None:
        """Return the session of an id; None if there is no such session.

        Raises:
          ApiError: The episode has ended.
        """
        if session_id in self._ended:
            raise _ended()
        return self._by_id.get(session_id)
