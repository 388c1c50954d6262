"""Loop of episodes: each is a coroutine that waits for the engine and for its environment in turns.

The engine decodes whatever replies are asked for, so episodes whose tools are slow hold up nobody. What is drawn
depends on seed, episode and turn alone, not on who was faster.
"""

import asyncio
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager, nullcontext
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
"""Episodes that come one after another, without an end."""

_FOR_EPISODES = ServingLimits(requests=_NO_BOUND, request_s=7 * 24 * 3600.0)
"""Limits of a run's own server: all of a step's episodes may ask at once, and wait for the engine and for updates.

The episode's own limit, which stands still between two rounds, ends a call before.
"""


@dataclass
class AgentLoop:
    """Goes through episodes with one engine, and environments in processes of their own.

    Attributes:
      format: Form of the policy's chats.
      max_prompt_tokens: Longest first prompt of an episode.
      max_response_tokens: Most tokens after it, replies and observations together.
      stop_tokens: Ids that end a reply, beside those of the chat's form.
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
            _server_class()  # or it is refused now, and not in the first step

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
        """Go through `copies` episodes of each problem.

        Args:
          engine: Engine with its weights loaded; nobody else may use it meanwhile.
          seed: In [0, 2**32). With a problem's id, the number of the copy and the turn it determines a reply.
          width: T, columns of the arrays.
          progress: Called after each episode with those that are over, and all.

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
        """Go on with groups of episodes until enough are complete, and begin those that are new.

        Between two calls, which have one engine, its weights may change. Episodes that are not asked for any more are
        given up.

        Returns:
          The groups that are complete now and were not before, in the order of `problems`.
        """
        if self._open is None:
            serve = partial(self._server, sampling=sampling)
            self._open = OpenEpisodes(self.episode, self.doors(_NO_BOUND), engine, serve)
        assert self._open.engine is engine, "episodes go on with the engine that they began with"
        try:
            finished = self._open.go_on(problems, groups, sampling, until, copies=copies, progress=progress)
        except BaseException:
            self._open = None
            raise
        return to_episode_batch(finished, width=width, sees=self.format.reader is not None)

    def close(self) -> None:
        """End the environments' processes."""
        if self._open is not None:
            self._open.close()
        self.pool.close()

    @contextmanager
    def _server(self, service: EngineService, sampling: Sampling) -> Iterator[SessionBook | None]:
        """Sessions of agent programs, whose calls a server answers; None where no environment is one."""
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
        """Semaphore of each kind of environment, which lets its own episodes in; at most so many come."""
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
        drawing: Callable[[EpisodeRun], AbstractAsyncContextManager[None]] = lambda run: nullcontext(),
    ) -> EpisodeRun:
        """An episode that is to begin with a problem.

        Args:
          episode: Part of what its draws depend on.
          place: Number by which the pool of environments is to know it; None is the episode's.
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
            drawing=drawing,
        )

    @property
    def _has_agents(self) -> bool:
        return any(isinstance(one, Agent) for one in choices(self.environment))

    @property
    def _stops(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys((*sorted(self.format.stop_tokens), *self.stop_tokens)))


def _server_class() -> "type[Server]":
    """The server, whose library is an extra."""
    try:
        from jaxrlhf.serving.server import Server
    except ImportError as error:
        raise Refusal(
            f"an agent program talks to the policy over HTTP, and {error.name} is not installed; "
            "pip install 'jaxrlhf[serve]'"
        ) from error
    return Server


async def _all(coroutines: Sequence[Any]) -> list[Any]:
    """Results of all; after the first error the others are cancelled and waited for."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
