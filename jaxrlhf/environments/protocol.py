"""Messages between a pool of environments and the processes that run them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxrlhf.config.environments import Agent, Environment, Tools
from jaxrlhf.episode import Content, FailureCause, Observation, Opening, Reply, ToolCall, ToolSchema


@dataclass(frozen=True)
class About:
    """User's code, as its processes describe it.

    Attributes:
      schemas: Tools that it offers in every episode.
      methods: Its tools are methods of an instance.
      waits: Numbers of the tools that are `async def`.
    """

    schemas: tuple[ToolSchema, ...] = ()
    methods: bool = False
    waits: frozenset[str] = frozenset()


@dataclass(frozen=True)
class OpenRequest:
    """Request: an instance for an episode. `Opening` answers."""

    episode: int
    record: Mapping[str, Any]
    seed: int


@dataclass(frozen=True)
class StepRequest:
    """Request: a step of an instance. `Observation` answers."""

    episode: int
    reply: Reply
    seed: int
    turn: int


@dataclass(frozen=True)
class CallRequest:
    """Request: tool calls, by number. `ToolAnswer` answers each.

    Attributes:
      episode: Its instance, if tools are methods.
      seed: Seed of the global random generators while they run.
    """

    episode: int
    calls: Mapping[int, ToolCall]
    seed: str


@dataclass(frozen=True)
class CloseRequest:
    """Request: the final reward, if it is asked for (`FinalReward`), and the end of an instance (`InstanceClosed`)."""

    episode: int
    rewarded: bool


@dataclass(frozen=True)
class RunRequest:
    """Request: an agent program. `FinalReward` answers."""

    episode: int
    record: Mapping[str, Any]
    seed: int
    base_url: str
    api_key: str


@dataclass(frozen=True)
class ToolAnswer:
    """Answer of a tool.

    Attributes:
      content: For the policy; says what is wrong where the tool failed.
    """

    number: int
    content: Content
    seconds: float
    failure: FailureCause | None = None


@dataclass(frozen=True)
class FinalReward:
    """Final reward; None is none."""

    reward: float | None


@dataclass(frozen=True)
class CodeFailure:
    """The user's code did not do what was asked."""

    cause: FailureCause
    detail: str


@dataclass(frozen=True)
class InstanceClosed:
    """An instance is gone; `failure` says what went wrong with that."""

    failure: CodeFailure | None


@dataclass(frozen=True)
class Idle:
    """A request is done.

    Attributes:
      spoilt: Why the process must not take on further episodes; empty where it may.
    """

    spoilt: str = ""


Choice = Tools | Environment | Agent
Request = OpenRequest | StepRequest | CallRequest | CloseRequest | RunRequest
Answer = Opening | Observation | ToolAnswer | FinalReward | CodeFailure | InstanceClosed | Idle
