"""Messages between a pool of environments and the processes that run them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxrlhf.config.environments import Agent, Environment, Tools
from jaxrlhf.episode import Content, FailureCause, Observation, Opening, Reply, ToolCall, ToolSchema


@dataclass(frozen=True)
class About:
    """Description of the user code, sent by its processes.

    Attributes:
      schemas: Schemas of the tools that the code offers in every episode.
      methods: True if the tools are methods of an instance.
      waits: Names of the tools that are `async def`.
    """

    schemas: tuple[ToolSchema, ...] = ()
    methods: bool = False
    waits: frozenset[str] = frozenset()


@dataclass(frozen=True)
class OpenRequest:
    """Request to make an instance for an episode. The answer is `Opening`."""

    episode: int
    record: Mapping[str, Any]
    seed: int


@dataclass(frozen=True)
class StepRequest:
    """Request for a step of an instance. The answer is `Observation`."""

    episode: int
    reply: Reply
    seed: int
    turn: int


@dataclass(frozen=True)
class CallRequest:
    """Request for tool calls, by number. The answer to each call is a `ToolAnswer`.

    Attributes:
      episode: Episode whose instance has the tools, if tools are methods.
      seed: Seed of the global random generators for the calls.
    """

    episode: int
    calls: Mapping[int, ToolCall]
    seed: str


@dataclass(frozen=True)
class CloseRequest:
    """Request to close an instance. The answers are `FinalReward`, if `rewarded`, and then `InstanceClosed`."""

    episode: int
    rewarded: bool


@dataclass(frozen=True)
class RunRequest:
    """Request to run an agent program. The answer is `FinalReward`."""

    episode: int
    record: Mapping[str, Any]
    seed: int
    base_url: str
    api_key: str


@dataclass(frozen=True)
class ToolAnswer:
    """Answer of a tool.

    Attributes:
      content: Content for the policy; an error message if the tool failed.
    """

    number: int
    content: Content
    seconds: float
    failure: FailureCause | None = None


@dataclass(frozen=True)
class FinalReward:
    """Final reward of an episode; None if the code gives no reward."""

    reward: float | None


@dataclass(frozen=True)
class CodeFailure:
    """Failure of the user code to fulfill a request."""

    cause: FailureCause
    detail: str


@dataclass(frozen=True)
class InstanceClosed:
    """Answer that an instance is closed; `failure` is the failure of its `close` method, if any."""

    failure: CodeFailure | None


Choice = Tools | Environment | Agent
Request = OpenRequest | StepRequest | CallRequest | CloseRequest | RunRequest
Answer = Opening | Observation | ToolAnswer | FinalReward | CodeFailure | InstanceClosed

ANSWERS: Mapping[type, tuple[type, ...]] = {
    OpenRequest: (Opening, CodeFailure, InstanceClosed),
    StepRequest: (Observation, CodeFailure),
    CallRequest: (ToolAnswer, CodeFailure),
    CloseRequest: (FinalReward, CodeFailure, InstanceClosed),
    RunRequest: (FinalReward, CodeFailure),
}
"""Answers that each request can have."""
