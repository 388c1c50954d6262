"""Agent loop: each episode is a coroutine that waits for the engine and for its environment in turn.

The engine decodes all replies that are requested at the moment, so an episode with slow tools delays no other episode.
Sampled tokens depend only on seed, episode and turn, not on timing.
"""

import asyncio
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from jaxrlhf.agent_loop.episode_run import EpisodeLimits, EpisodeRun
from jaxrlhf.agent_loop.open_episodes import OpenEpisodes
from jaxrlhf.agent_loop.recorded import Finished
from jaxrlhf.agent_loop.rows import to_episode_batch
from jaxrlhf.batch import EpisodeBatch, Problem
from jaxrlhf.batching.partial_rollouts import OpenGroups, Round
from jaxrlhf.config import Agent, AnyEnvironment, Refusal, Sampling
from jaxrlhf.config.environments import choice, choices
from jaxrlhf.config.serving import ServingLimits
from jaxrlhf.conversations.chat_format import ChatFormat
from jaxrlhf.engine import Engine
from jaxrlhf.engine.service import EngineService
from jaxrlhf.environments.pool import EnvironmentPool
from jaxrlhf.serving.served import ServedModel
from jaxrlhf.serving.sessions import SessionBook

if TYPE_CHECKING:
    from jaxrlhf.serving.server import Server

_NO_BOUND = 1 << 30
"""Limit for an unbounded number of episodes or requests."""

_FOR_EPISODES = ServingLimits(requests=_NO_BOUND, request_s=7 * 24 * 3600.0)
"""Limits of a run's own server: all episodes of a step may call at once, and wait for the engine and for updates.

The episode's own time limit, which is paused between two rounds, ends a call earlier.
"""


@dataclass
class AgentLoop:
    """Runner of multi-turn episodes, with one engine and with environments in separate processes.

    Attributes:
      format: Chat format of the policy.
      max_prompt_tokens: Maximum number of tokens of an episode's first prompt.
      max_response_tokens: Maximum number of tokens after the first prompt, replies and observations together.
      stop_tokens: Token ids that end a reply, in addition to the stop tokens of the chat format.
    """

    environment: AnyEnvironment
    format: ChatFormat
    pool: EnvironmentPool
    max_prompt_tokens: int
    max_response_tokens: int
    stop_tokens: tuple[int, ...] = ()
    _open: OpenEpisodes | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        if self._has_agents:
            _server_class()  # raises now, instead of in the first step, if the library is missing

    def run(
        self,
        engine: Engine,
        problems: Sequence[Problem],
        sampling: Sampling,
        *,
        copies: int,
        seed: int,
        width: int,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> EpisodeBatch:
        """Run `copies` episodes of each problem to their end.

        Args:
          engine: Engine with its weights loaded; no other code may use it meanwhile.
          seed: In [0, 2**32). Seed, problem id, copy number and turn determine a reply.
          width: T, columns of the arrays.
          progress: Called after each episode with the number of finished episodes and the total.

        Raises:
          Diverged: The policy's logits are not finite.
        """
        with EngineService(engine) as service, self._server(service, sampling) as sessions:
            finished = asyncio.run(self._run(service, sessions, problems, sampling, copies, seed, progress))
        return to_episode_batch(finished, width=width, sees=self.format.reader is not None)

    def go_on(
        self,
        engine: Engine,
        problems: Sequence[Problem],
        groups: OpenGroups,
        sampling: Sampling,
        until: Round,
        *,
        copies: int,
        width: int,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> EpisodeBatch:
        """Continue groups of episodes until enough groups are complete; start groups that are new.

        All calls must pass the same engine; its weights may change between two calls. Open groups that are missing in
        `problems` are dropped.

        Returns:
          Episodes of the groups that became complete in this call, in the order of `problems`.
        """
        if self._open is None:
            serve = partial(self._server, sampling=sampling)
            self._open = OpenEpisodes(self.episode, self.doors(_NO_BOUND), engine, serve)
        assert self._open.engine is engine, "episodes must continue with the engine that started them"
        try:
            finished = self._open.go_on(problems, groups, sampling, until, copies=copies, progress=progress)
        except BaseException:
            self._open = None
            raise
        return to_episode_batch(finished, width=width, sees=self.format.reader is not None)

    def close(self) -> None:
        """Drop open episodes and end the environments' processes."""
        if self._open is not None:
            self._open.close()
        self.pool.close()

    @contextmanager
    def _server(self, service: EngineService, sampling: Sampling) -> Iterator[SessionBook | None]:
        """Serve agent programs and yield their sessions; yield None if no environment is an agent program."""
        if not self._has_agents:
            yield None
            return
        form, stops = self.format, self.stop_tokens
        model = ServedModel("policy", service, form.tokenizer, stops, limits=_FOR_EPISODES, images=form.reader)
        with _server_class()(model, token=secrets.token_urlsafe(16), sampling=sampling) as server:
            yield server.sessions

    async def _run(
        self,
        service: EngineService,
        sessions: SessionBook | None,
        problems: Sequence[Problem],
        sampling: Sampling,
        copies: int,
        seed: int,
        progress: Callable[[int, int], None],
    ) -> list[Finished]:
        over, total = 0, len(problems) * copies

        async def play(problem: Problem, copy: int) -> Finished:
            nonlocal over
            number = problem.prompt_id * copies + copy
            run = self.episode(problem, number, sampling=sampling, seed=seed, service=service, sessions=sessions)
            async with doors[run.environment]:
                finished = await run.finished()
            over += 1
            progress(over, total)
            return finished

        doors = self.doors(total)
        return await _all([play(problem, copy) for problem in problems for copy in range(copies)])

    def doors(self, episodes: int) -> list[asyncio.Semaphore]:
        """Return a semaphore per environment that limits its open episodes; `episodes` is the limit if none is set."""
        return [asyncio.Semaphore(one.in_flight or episodes) for one in choices(self.environment)]

    def episode(
        self,
        problem: Problem,
        episode: int,
        *,
        sampling: Sampling,
        seed: int,
        service: EngineService,
        sessions: SessionBook | None = None,
        place: int | None = None,
    ) -> EpisodeRun:
        """Build the run of one episode of a problem.

        Args:
          episode: Id of the episode; sampling depends on it.
          place: Key of the episode in the environment pool; None uses the episode id.
        """
        number = choice(self.environment, problem.record)
        return EpisodeRun(
            problem=problem,
            episode=episode,
            environment=number,
            place=episode if place is None else place,
            settings=choices(self.environment)[number],
            limits=EpisodeLimits(self.max_prompt_tokens, self.max_response_tokens, self._stops),
            sampling=sampling,
            seed=seed,
            format=self.format,
            pool=self.pool,
            service=service,
            sessions=sessions,
        )

    @property
    def _has_agents(self) -> bool:
        return any(isinstance(one, Agent) for one in choices(self.environment))

    @property
    def _stops(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys((*sorted(self.format.stop_tokens), *self.stop_tokens)))


def _server_class() -> "type[Server]":
    """Import the server class; its library is an optional dependency."""
    try:
        from jaxrlhf.serving.server import Server
    except ImportError as error:
        raise Refusal(
            f"an agent program calls the policy over HTTP, which requires {error.name}: pip install 'jaxrlhf[serve]'"
        ) from error
    return Server


async def _all(coroutines: Sequence[Any]) -> list[Any]:
    """Await all coroutines and return their results; after the first error, cancel the others and wait for them."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
