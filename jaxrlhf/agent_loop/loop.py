"""Agent loop: each episode is a coroutine that waits for the engine and for its environment in turn.

The engine decodes all replies that are requested at the moment, so an episode with slow tools delays no other episode.
Sampled tokens depend only on seed, episode and turn, not on timing.
"""

import asyncio
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from jaxrlhf.agent_loop.episode_run import EpisodeLimits, EpisodeRun
from jaxrlhf.agent_loop.open_episodes import OpenEpisodes
from jaxrlhf.agent_loop.recorded import Finished
from jaxrlhf.agent_loop.rows import episodes_to_rollout
from jaxrlhf.batch import Problem, RolloutBatch
from jaxrlhf.batching.partial_rollouts import OpenGroups, Round
from jaxrlhf.config import Agent, AnyEnvironment, Refusal, Sampling
from jaxrlhf.config.environments import choice, choices
from jaxrlhf.config.serving import ServingLimits
from jaxrlhf.conversations.chat_format import ChatFormat
from jaxrlhf.engine import Engine
from jaxrlhf.engine.rollout_engine import RequestService, RolloutEngine
from jaxrlhf.engine.servers.server_engine import ServerEngine
from jaxrlhf.engine.servers.server_service import ServerService
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
    _opened_by: RolloutEngine | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        if self._has_agents:
            _server_class()  # raises now, instead of in the first step, if the library is missing

    def run(
        self,
        engine: RolloutEngine,
        problems: Sequence[Problem],
        sampling: Sampling,
        *,
        copies: int,
        seed: int,
        width: int,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> RolloutBatch:
        """Run `copies` episodes of each problem to their end.

        Args:
          engine: Engine with its weights loaded; no other code may use it during the call.
          seed: In [0, 2**32). Seed, problem id, copy number and turn determine a reply.
          width: T, columns of the arrays.
          progress: Called after each episode with the number of finished episodes and the total.

        Raises:
          Diverged: The policy's logits are not finite.
        """
        groups = OpenGroups.begin(len(problems), copies=copies, seed=seed, step=0)
        until = Round(len(problems), len(problems), due=0)
        with closing(self._open_episodes(engine, sampling)) as episodes:
            finished = episodes.resume_groups(problems, groups, sampling, until, progress=progress)
        return self._batch(finished, width)

    def resume_groups(
        self,
        engine: RolloutEngine,
        problems: Sequence[Problem],
        groups: OpenGroups,
        sampling: Sampling,
        until: Round,
        *,
        width: int,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> RolloutBatch:
        """Continue groups of episodes until enough groups are complete; start groups that are new.

        All calls must pass the same engine; its weights may change between two calls. Open groups that are missing in
        `problems` are dropped.

        Returns:
          Episodes of the groups that became complete in this call, in the order of `problems`.
        """
        if self._open is None:
            self._open, self._opened_by = self._open_episodes(engine, sampling), engine
        assert self._opened_by is engine, "episodes must continue with the engine that started them"
        try:
            finished = self._open.resume_groups(problems, groups, sampling, until, progress=progress)
        except BaseException:
            self._open = None
            raise
        return self._batch(finished, width)

    def close(self) -> None:
        """Drop open episodes and end the environments' processes."""
        if self._open is not None:
            self._open.close()
        self.pool.close()

    def _open_episodes(self, engine: RolloutEngine, sampling: Sampling) -> OpenEpisodes:
        limits = [asyncio.Semaphore(one.in_flight or _NO_BOUND) for one in choices(self.environment)]
        return OpenEpisodes(self._episode, limits, _service_of(engine), partial(self._server, sampling=sampling))

    def _batch(self, finished: Sequence[Finished], width: int) -> RolloutBatch:
        return episodes_to_rollout(finished, width=width, sees=self.format.reader is not None)

    @contextmanager
    def _server(self, service: RequestService, sampling: Sampling) -> Iterator[SessionBook | None]:
        """Serve agent programs and yield their sessions; yield None if no environment is an agent program."""
        if not self._has_agents:
            yield None
            return
        assert isinstance(service, EngineService), "agent programs require the built-in engine"
        form, stops = self.format, self.stop_tokens
        model = ServedModel("policy", service, form.tokenizer, stops, limits=_FOR_EPISODES, images=form.reader)
        with _server_class()(model, token=secrets.token_urlsafe(16), sampling=sampling) as server:
            yield server.sessions

    def _episode(
        self,
        problem: Problem,
        episode: int,
        *,
        sampling: Sampling,
        seed: int,
        service: RequestService,
        sessions: SessionBook | None,
    ) -> EpisodeRun:
        """Build the run of one episode of a problem; sampling depends on the id `episode`."""
        number = choice(self.environment, problem.record)
        return EpisodeRun(
            problem=problem,
            episode=episode,
            environment=number,
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


def _service_of(engine: RolloutEngine) -> RequestService:
    """Return a new service of an engine.

    Raises:
      Refusal: The engine is of a user, and has no service.
    """
    if isinstance(engine, Engine):
        return EngineService(engine)
    if isinstance(engine, ServerEngine):
        return ServerService(engine)
    raise Refusal(
        f"{type(engine).__name__} generates whole responses, but episodes ask for one reply after another; use the "
        "built-in engine or rollout.server, or set environment=None"
    )


def _server_class() -> "type[Server]":
    """Import the server class; its library is an optional dependency."""
    try:
        from jaxrlhf.serving.server import Server
    except ImportError as error:
        raise Refusal(
            f"an agent program calls the policy over HTTP, which requires {error.name}: pip install 'jaxrlhf[serve]'"
        ) from error
    return Server
