"""Open episodes of a pool: turns calls into requests to worker processes, and answers into results of futures.

All code here runs on the pool's thread.
"""

import logging
import pickle
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from functools import partial

from jaxrlhf.config.environments import Agent, Tools
from jaxrlhf.environments.protocol import (
    CLOSE,
    RETURNS,
    REWARD,
    CallRequest,
    Choice,
    CloseRequest,
    OpenRequest,
    Request,
    RunRequest,
    StepRequest,
)
from jaxrlhf.environments.turns import ToolTurn
from jaxrlhf.episode import EnvironmentFailure, FailureCause, Opening, Reply
from jaxrlhf.processes.jobs import Answer, CodeFailure, Job, Process
from jaxrlhf.processes.workers import WorkerGroup

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class _Live:
    """Open episode.

    Attributes:
      opened: Request that made the episode's instance; its `process` has the instance. None without an instance.
      future: Future of the current call; None if no call is open.
      jobs: Requests of the current call.
      turn: Number of replies so far.
    """

    number: int
    choice: Choice
    group: WorkerGroup
    seed: int
    opened: Job | None = None
    future: Future | None = None
    jobs: list[Job] = field(default_factory=list)
    turn: int = 0

    @property
    def process(self) -> Process | None:
        return self.opened.process if self.opened is not None else None

    def resolve(self, future: Future | None, value: object) -> None:
        """Set a value or an error as the result of a future, if the future is still the episode's current one."""
        if future is None or future is not self.future:
            return
        self.future = None
        if isinstance(value, CodeFailure):
            value = EnvironmentFailure(value.cause, value.detail)
        if isinstance(value, BaseException):
            future.set_exception(value)
        else:
            future.set_result(value)


class LiveEpisodes:
    """Open episodes of a pool.

    Args:
      choices: Environments of the pool.
      groups: Processes of each environment.

    Attributes:
      closing_failures: Number of instances that failed to close, by cause.
    """

    def __init__(self, choices: Sequence[Choice], groups: Sequence[WorkerGroup]) -> None:
        self._choices = list(zip(choices, groups, strict=True))
        self._live: dict[int, _Live] = {}
        self.closing_failures: Counter[FailureCause] = Counter()

    def start(self, choice: int, request: OpenRequest, pickled: bytes, future: Future) -> None:
        episode = self._open(request.episode, choice, request.seed, future)
        if isinstance(episode.choice, Tools):
            episode.resolve(future, Opening(tools=episode.group.about.schemas))
        else:
            episode.opened = self._send(episode, request, pickled)

    def run_agent(self, choice: int, request: RunRequest, pickled: bytes, future: Future) -> None:
        episode = self._open(request.episode, choice, request.seed, future)
        if not isinstance(episode.choice, Agent):
            raise RuntimeError(f"{episode.group.code.name} is not an agent program")
        self._send(episode, request, pickled)

    def step(self, number: int, reply: Reply, future: Future) -> None:
        episode = self._idle_episode(number, future)
        episode.turn += 1
        about = episode.group.about
        if not (about.methods or isinstance(episode.choice, Tools)):
            self._send(episode, StepRequest(number, reply, episode.seed, episode.turn))
            return
        turn = ToolTurn(reply, [schema["function"]["name"] for schema in about.schemas], about.waits)
        episode.jobs.clear()
        if turn.pending:
            self._make_calls(episode, turn, list(turn.pending))
        else:
            episode.resolve(future, turn.observation())

    def finish(self, number: int, future: Future) -> None:
        episode = self._idle_episode(number, future)
        del self._live[number]
        if episode.opened is None:
            episode.resolve(future, None)
        else:
            self._send(episode, CloseRequest(number, rewarded=True))

    def drop(self, number: int) -> None:
        episode = self._live.pop(number, None)
        if episode is None:
            return
        for job in episode.jobs if episode.future is not None else ():
            episode.group.forget(job)
        episode.resolve(episode.future, CancelledError())
        if episode.process is not None and not episode.process.ending:
            self._send(episode, CloseRequest(number, rewarded=False))

    def feed(self) -> None:
        """Do nothing: requests are sent as soon as they are made."""

    def over(self, error: BaseException) -> None:
        """Forget all episodes because the pool has ended."""
        self._live.clear()

    def _open(self, number: int, choice: int, seed: int, future: Future) -> _Live:
        if number in self._live:
            raise RuntimeError(f"episode {number} is open already")
        episode = self._live[number] = _Live(number, *self._choices[choice], seed, future=future)
        return episode

    def _idle_episode(self, number: int, future: Future) -> _Live:
        """Return an open episode without a current call, and set the future of its next call."""
        episode = self._live.get(number)
        if episode is None:
            raise RuntimeError(f"there is no episode {number}: it was not started, is finished, or has failed")
        if episode.future is not None:
            raise RuntimeError(f"episode {number} has not answered the previous call")
        episode.future = future
        return episode

    def _send(self, episode: _Live, request: Request, pickled: bytes | None = None) -> Job:
        """Send a request whose answer resolves the episode's current future."""

        def answered(answer: Answer) -> None:
            if isinstance(request, CloseRequest) and answer.number == CLOSE:
                if episode.process is not None:
                    episode.process.instances.discard(episode.number)
                self._count(episode, answer.failure)
                return
            lost = episode.process is None or episode.process.ending
            unopened = answer.failure is not None and isinstance(request, OpenRequest)
            if unopened or (answer.failure is not None and lost) or isinstance(request, RunRequest):
                self._forget(episode)
            episode.resolve(future, answer.failure or answer.value)
            if unopened and not lost:
                self._send(episode, CloseRequest(episode.number, rewarded=False))

        future = episode.future
        episode.jobs.clear()
        left = [REWARD]
        if isinstance(request, CloseRequest):
            left = [REWARD, CLOSE] if request.rewarded else [CLOSE]
        return self._submit(episode, request, left, answered, pickled=pickled)

    def _make_calls(self, episode: _Live, turn: ToolTurn, numbers: Sequence[int]) -> None:
        """Make tool calls of a reply."""
        future = episode.future
        calls = {number: turn.pending[number] for number in numbers}

        def answered(answer: Answer) -> None:
            if answer.failure and episode.process is not None and episode.process.ending:  # the instance is lost too
                self._forget(episode)
                episode.resolve(future, answer.failure)
                return
            turn.answered(answer)
            if not turn.pending:
                episode.resolve(future, turn.observation())

        self._submit(
            episode,
            CallRequest(episode.number, calls, f"{episode.seed}/{episode.turn}"),
            list(numbers),
            answered,
            again=None if episode.opened else partial(self._make_calls, episode, turn),
            together=[number for number in numbers if turn.waits(number)],
        )

    def _submit(
        self,
        episode: _Live,
        request: Request,
        left: list[int],
        answered: Callable[[Answer], None],
        *,
        pickled: bytes | None = None,
        again: Callable[[list[int]], None] | None = None,
        together: Collection[int] = (),
    ) -> Job:
        opens = isinstance(request, OpenRequest)
        job = Job(
            pickle.dumps(request) if pickled is None else pickled,
            left,
            RETURNS[type(request)],
            answered,
            partial(episode.resolve, episode.future),
            again,
            together,
            opens=episode.number if opens else None,
            steps=2 if opens else 1,  # factory and reset
            process=episode.process,
        )
        episode.jobs.append(job)
        episode.group.submit(job)
        return job

    def _forget(self, episode: _Live) -> None:
        if self._live.get(episode.number) is episode:
            del self._live[episode.number]

    def _count(self, episode: _Live, failure: CodeFailure | None) -> None:
        if failure is not None:
            self.closing_failures[failure.cause] += 1
            logger.warning("episode %d failed to close: %s: %s", episode.number, failure.cause, failure.detail)
