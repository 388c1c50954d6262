"""Messages between a pool of environments and the processes that run them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxrlhf.config.environments import Agent, Environment, Tools
from jaxrlhf.episode import Content, Observation, Opening, Reply, ToolCall, ToolSchema


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
    """Request to make an instance for an episode."""

    episode: int
    record: Mapping[str, Any]
    seed: int


@dataclass(frozen=True)
class StepRequest:
    """Request for a step of an instance."""

    episode: int
    reply: Reply
    seed: int
    turn: int


@dataclass(frozen=True)
class CallRequest:
    """Request for tool calls, by number.

    Attributes:
      episode: Episode whose instance has the tools, if tools are methods.
      seed: Seed of the global random generators for the calls.
    """

    episode: int
    calls: Mapping[int, ToolCall]
    seed: str


@dataclass(frozen=True)
class CloseRequest:
    """Request to close an instance, after its final reward if `rewarded`."""

    episode: int
    rewarded: bool


@dataclass(frozen=True)
class RunRequest:
    """Request to run an agent program, which returns the final reward or None."""

    episode: int
    record: Mapping[str, Any]
    seed: int
    base_url: str
    api_key: str


Choice = Tools | Environment | Agent
Request = OpenRequest | StepRequest | CallRequest | CloseRequest | RunRequest

RETURNS: Mapping[type, Any] = {
    OpenRequest: Opening,
    StepRequest: Observation,
    CallRequest: Content,
    CloseRequest: float | None,
    RunRequest: float | None,
}
"""Type of the values that each request returns."""

REWARD, CLOSE = 0, 1
"""Numbers of the calls of a `CloseRequest`; the one call of other requests is 0."""
