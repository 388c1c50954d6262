"""Run of one episode, from its opening to its end."""

import asyncio
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from jaxrlhf.agent_loop.recorded import Finished, recorded_episode
from jaxrlhf.batch import Problem
from jaxrlhf.config import Agent, Environment, Refusal, Sampling, Tools
from jaxrlhf.config.serving import SessionLimits
from jaxrlhf.conversations.chat_format import ChatFormat
from jaxrlhf.conversations.conversation import Conversation
from jaxrlhf.conversations.images import restore_images, store_images
from jaxrlhf.engine import Completion, Request
from jaxrlhf.engine.rollout_engine import RequestService
from jaxrlhf.environments.pool import EnvironmentPool
from jaxrlhf.episode import (
    EnvironmentFailure,
    EpisodeRecord,
    Message,
    Observation,
    Opening,
    Reply,
    StopCause,
    TurnRecord,
)
from jaxrlhf.serving.sessions import SessionBook


class EpisodeLimits(NamedTuple):
    """Limits of all episodes: tokens of the first prompt, tokens after the first prompt, ids that end a reply."""

    max_prompt_tokens: int
    max_response_tokens: int
    stop_tokens: tuple[int, ...]


class EpisodeEnd(Exception):
    """End of an episode for any reason other than the environment's `done`."""

    def __init__(self, stop: StopCause, detail: str = "") -> None:
        super().__init__(detail)
        self.stop, self.detail = stop, detail


@dataclass
class EpisodeRun:
    """Episode in progress.

    Attributes:
      episode: Id of the episode; sampling depends on it.
      environment: Index of the episode's environment among the environments of the run.
      pool_key: Key of the episode in the environment pool, unique in this process.
    """

    problem: Problem
    episode: int
    environment: int
    settings: Tools | Environment | Agent
    limits: EpisodeLimits
    sampling: Sampling
    seed: int
    format: ChatFormat
    pool: EnvironmentPool
    service: RequestService
    sessions: SessionBook | None = None
    pool_key: int = field(default_factory=itertools.count().__next__)
    _turns: list[TurnRecord] = field(default_factory=list)
    _states: list[object] = field(default_factory=list)
    _metrics: dict[str, float] = field(default_factory=dict)
    _conversation: Conversation | None = None
    _opening: Sequence[Message] = ()
    _final: float | None = None
    _clock: asyncio.Timeout | None = None
    _left_s: float | None = None

    @property
    def _turn_settings(self) -> Tools | Environment:
        """Settings of an environment that answers turn by turn."""
        assert not isinstance(self.settings, Agent), "an agent program makes its own turns"
        return self.settings

    @property
    def _group_seed(self) -> int:
        """Seed of the environment; all episodes of a problem share it, so that they start in one state."""
        return _seed(self.seed, self.problem.prompt_id, 0)

    async def play(self) -> Finished:
        """Run the episode to its end: as an agent program, or turn by turn."""
        return await (self._play_agent() if isinstance(self.settings, Agent) else self._play_turns())

    async def _play_turns(self) -> Finished:
        """Run the episode turn by turn."""
        try:
            async with asyncio.timeout(self.settings.episode_s) as self._clock:
                stop, detail = await self._until_done(), ""
                self._final = await asyncio.wrap_future(self.pool.finish(self.pool_key))
        except EpisodeEnd as ended:
            stop, detail = await self._fetch_final(ended.stop, ended.detail)
        except EnvironmentFailure as failure:
            stop, detail = _failed(failure)
        except TimeoutError:
            stop, detail = "episode_timeout", f"over {self.settings.episode_s:g} s"
            if len(self._states) > len(self._turns):  # the policy was replying, so the environment is free to answer
                stop, detail = await self._fetch_final(stop, detail)
        finally:
            self._clock = None
            self.pool.drop(self.pool_key)  # if the episode is still open there
            self.service.release(self.episode)
        return self._finished(stop, detail)

    def stop_clock(self) -> None:
        """Pause the episode's time limit while the policy answers no requests; call it in the event loop's thread."""
        if self._clock is not None and (end := self._clock.when()) is not None and not self._clock.expired():
            self._left_s = end - asyncio.get_running_loop().time()
            self._clock.reschedule(None)

    def start_clock(self) -> None:
        """Resume the episode's time limit."""
        if self._clock is not None and self._left_s is not None:
            self._clock.reschedule(asyncio.get_running_loop().time() + self._left_s)
        self._left_s = None

    async def _play_agent(self) -> Finished:
        """Run the episode as an agent program; the server that answers its calls records them."""
        assert self.sessions is not None, "an agent program requires a server"
        limits = SessionLimits(
            calls=self.settings.max_turns,
            tokens=self.limits.max_response_tokens,
            call_tokens=self.settings.turn_tokens,
        )
        stop: StopCause = "done"
        detail, score = "", None
        history = self.settings.history
        base_url, api_key = self.sessions.open(self.episode, self.seed, limits, history=history)
        try:
            async with asyncio.timeout(self.settings.episode_s) as self._clock:
                call = self.pool.run_agent(
                    self.pool_key, self.environment, self.problem.record, self._group_seed, base_url, api_key
                )
                score = await asyncio.wrap_future(call)
        except EnvironmentFailure as failure:
            stop, detail = _failed(failure)
        except TimeoutError:
            stop, detail = "episode_timeout", f"over {self.settings.episode_s:g} s"
        finally:
            self._clock = None
            self.pool.drop(self.pool_key)
            recorded = self.sessions.close(self.episode)
        if stop == "environment_error" and recorded.calls and recorded.refused:  # a limit made the program fail
            stop = "turns" if "calls" in recorded.refused else "tokens_of_episode"
        return recorded_episode(
            self.problem, self.episode, self.environment, self.format, recorded, score, stop, detail
        )

    async def _fetch_final(self, stop: StopCause, detail: str) -> tuple[StopCause, str]:
        """Fetch the final reward after a limit ended the episode; return the limit, or the environment's failure."""
        self._clock = None  # the timeout block has ended
        try:
            self._final = await asyncio.wrap_future(self.pool.finish(self.pool_key))
        except EnvironmentFailure as failure:
            return _failed(failure)
        return stop, detail

    async def _until_done(self) -> StopCause:
        """Alternate replies and observations until the environment reports that the episode is over.

        Raises:
          EpisodeEnd: A limit ends the episode earlier.
        """
        started = self.pool.start(self.pool_key, self.environment, self.problem.record, self._group_seed)
        opening = await asyncio.wrap_future(started)
        conversation = self._begin(opening)
        max_tokens, state = opening.max_tokens, opening.state
        while True:
            self._states.append(state)
            start, held_s = time.perf_counter(), self.service.held_s
            reply = await self._reply(conversation, max_tokens)
            policy_s = time.perf_counter() - start - (self.service.held_s - held_s)
            self._turns.append(TurnRecord(reply, policy_s=policy_s))
            self._check_reply(reply)
            start = time.perf_counter()
            observation = await asyncio.wrap_future(self.pool.step(self.pool_key, reply))
            self._note(observation, time.perf_counter() - start)
            if observation.done:
                if isinstance(self.settings, Tools):  # a reply without calls
                    return "answered" if reply.ended else "tokens_of_turn"
                return "done"
            self._check_turn(observation)
            self._observe(conversation, observation)
            max_tokens, state = observation.max_tokens, observation.state

    def _begin(self, opening: Opening) -> Conversation:
        """Start the conversation, from the environment's messages or, if there are none, from the record's prompt."""
        try:
            self.format.check_tools(opening.tools)
        except Refusal as error:
            raise EnvironmentFailure("wrong-type", str(error)) from error
        # The record's prompt tokens include the tools of a `Tools` setting, but not the tools of an environment class.
        shown = isinstance(self.settings, Tools) or not opening.tools
        own = self.problem.prompt_tokens if shown and not opening.messages and not opening.appended else None
        *before, last = opening.messages or restore_images(self.problem.messages, self.problem.images)
        messages = [*before, {**last, "content": _appended(last["content"], opening.appended)}]
        self._opening = store_images(messages)
        conversation = Conversation(
            self.format,
            messages,
            opening.tools,
            history=self.settings.history,
            cut_turns=self._turn_settings.cut_turns,
            prompt_tokens=own,
            images=self.problem.images if own is not None else (),
        )
        tokens = len(conversation.prompt)
        if tokens > self.limits.max_prompt_tokens:
            raise EnvironmentFailure(
                "output", f"its first prompt has {tokens} tokens, more than rollout.max_prompt_tokens={self.limits[0]}"
            )
        self._conversation, self._first_tokens = conversation, tokens
        return conversation

    def _tokens_left(self, conversation: Conversation) -> int:
        """Return the number of tokens that the episode may still add."""
        used = max(len(conversation.prompt) - self._first_tokens, 0)
        return self.limits.max_response_tokens - used

    async def _reply(self, conversation: Conversation, max_tokens: int | None) -> Reply:
        """Sample the policy's next reply, of at most `max_tokens` if the environment sets a limit."""
        limits = [self._tokens_left(conversation), self.settings.turn_tokens, max_tokens]
        request = Request(
            self.episode,
            conversation.prompt,
            max_tokens=max(1, min(limit for limit in limits if limit is not None)),
            stop_tokens=self.limits.stop_tokens,
            keep=True,
            images=conversation.images,
            has_replies=bool(self._turns),
        )
        seed = _seed(self.seed, len(self._turns), 1)
        completion: Completion = await asyncio.wrap_future(self.service.submit(request, self.sampling, seed=seed))
        ended = not completion.truncated
        return conversation.sampled(completion.tokens, completion.logps, completion.version, ended=ended)

    def _check_reply(self, reply: Reply) -> None:
        """Raise `EpisodeEnd` if a limit or a malformed call keeps the reply from the environment."""
        assert self._conversation is not None
        if not reply.ended:
            if self._tokens_left(self._conversation) <= 0:
                raise EpisodeEnd("tokens_of_episode")
            if self._turn_settings.cut_turns == "end":
                raise EpisodeEnd("tokens_of_turn")
        if reply.malformed and self._turn_settings.malformed_calls == "end":
            raise EpisodeEnd("malformed_call", reply.malformed[0].detail)
        if sum(len(turn.reply.calls) for turn in self._turns) > self._turn_settings.max_calls:
            raise EpisodeEnd("tool_calls")

    def _note(self, observation: Observation, environment_s: float) -> None:
        """Record the environment's answer to the last reply."""
        self._turns[-1] = replace(
            self._turns[-1],
            observed=tuple(store_images(observation.messages)),
            reward=float(observation.reward),
            environment_s=environment_s,
            calls=tuple(observation.calls),
        )
        self._metrics |= observation.metrics

    def _check_turn(self, observation: Observation) -> None:
        if observation.truncated:
            raise EpisodeEnd("environment_truncated")
        if len(self._turns) >= self.settings.max_turns:
            raise EpisodeEnd("turns")

    def _observe(self, conversation: Conversation, observation: Observation) -> None:
        """Append the environment's messages to the conversation, within the remaining token limits."""
        if not observation.messages:
            raise EnvironmentFailure("wrong-type", "it returned no message and did not end the episode")
        left, limit = self._tokens_left(conversation) - 1, self._turn_settings.observation_tokens
        most = min(left, limit)
        inserted = conversation.observe(observation.messages, most_tokens=most) if most > 0 else 0
        if not inserted and limit < left and any(not isinstance(one["content"], str) for one in observation.messages):
            raise EnvironmentFailure(
                "output",
                f"its messages with images have more than observation_tokens={limit}, and images cannot be truncated",
            )
        if not inserted or self._tokens_left(conversation) <= 0:
            raise EpisodeEnd("tokens_of_episode")

    def _finished(self, stop: StopCause, detail: str) -> Finished:
        rewards = [turn.reward for turn in self._turns]
        has_reward = self._final is not None or not isinstance(self.settings, Tools)
        if self._final is not None and rewards:
            rewards[-1] += self._final
        record = EpisodeRecord(
            opening=tuple(self._opening),
            turns=tuple(self._turns),
            stop=stop,
            environment=self.environment,
            failure=detail,
            environment_reward=float(sum(rewards)) if has_reward else None,
            metrics=dict(self._metrics),
        )
        sequences = self._conversation.sequences() if self._conversation is not None and self._turns else ()
        # A rewritten history starts a further sequence; if no reply follows, the sequence has no token to train on.
        sequences = tuple(sequence for sequence in sequences if any(sequence.mask))
        if len(sequences) > 1:
            record = replace(record, forks={"template": len(sequences) - 1})
        return Finished(self.problem, self.episode, record, sequences, rewards, tuple(self._states))


def _appended(content: Any, text: str) -> Any:
    """Append a text to a message's content."""
    if not text:
        return content
    return content + text if isinstance(content, str) else [*content, {"type": "text", "text": text}]


def _failed(failure: EnvironmentFailure) -> tuple[StopCause, str]:
    """Return the stop cause and detail of an environment failure."""
    return "environment_timeout" if failure.cause == "timeout" else "environment_error", str(failure)


def _seed(*parts: int) -> int:
    """Hash integers to a seed in [0, 2**32)."""
    return int(np.random.SeedSequence(parts).generate_state(1)[0])
