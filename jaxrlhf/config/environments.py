"""Environments that a policy acts in: tools, environments and agent programs of a user's own."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Literal

from jaxrlhf.config.named_functions import check_reference
from jaxrlhf.config.refusal import require
from jaxrlhf.config.settings import Finite, Positive, Settings


@dataclass(frozen=True, kw_only=True)
class Episodes(Settings):
    """Base class of environments: the limits of their episodes, and the processes that they run in.

    Attributes:
      name: Name in metrics, and in the record's field that chooses among several environments.
      max_turns: Replies of an episode, at most.
      turn_tokens: Tokens of a reply, at most; None is what is left of the episode.
      episode_s: Wall-clock limit of an episode; None is none.
      truncated: An episode that a limit ended keeps its score, has a score of 0, or is left out of training.
      history: Beginning of the next turn: all tokens as they were sampled, or what the chat template makes of the
        messages, which may drop reasoning; each change of what was said begins a further sequence.
      memory_bytes: Address space that a process may add to what it has once the user's code is loaded.
      output_bytes: Text that a call may answer with or print, at most.
      in_flight: Episodes under way at once; None is all of a step's.
    """

    name: str = ""
    max_turns: Positive[int] = 8
    turn_tokens: Positive[int] | None = None
    episode_s: Positive[float] | None = None
    truncated: Literal["score", "zero", "leave_out"] = "score"
    history: Literal["as_sampled", "as_templated"] = "as_sampled"
    memory_bytes: Positive[int] = 1 << 31
    output_bytes: Positive[int] = 1 << 20
    in_flight: Positive[int] | None = None


@dataclass(frozen=True, kw_only=True)
class Turns(Episodes):
    """Base class of environments that answer the policy turn by turn.

    `Rollout.max_response_tokens` bounds all that follows an episode's first prompt, replies and observations together.

    Attributes:
      max_calls: Tool calls of an episode, at most.
      observation_tokens: Tokens of what is said after a reply, at most; longer text is cut, and the policy is told so.
      call_s: Wall-clock limit of one call of a tool, or of one method of an environment; its process is ended then.
      malformed_calls: A tool call that cannot be made is answered with an error message, or ends the episode.
      cut_turns: A reply that was cut at `turn_tokens` ends the episode, or is closed by an end-of-turn token that the
        policy is not trained on.
      workers: Calls of tools or environments that run at once, each in a process of its own.
    """

    max_calls: Positive[int] = 64
    observation_tokens: Positive[int] = 512
    call_s: Finite[Positive[float]] = 10.0
    malformed_calls: Literal["answer", "end"] = "answer"
    cut_turns: Literal["end", "close"] = "end"
    workers: Positive[int] = 64


@dataclass(frozen=True)
class Tools(Turns):
    """Functions that the policy may call: an episode ends with a reply that calls none.

    Attributes:
      functions: Each `module:function` or `path/to/file.py:function`, with type hints and a docstring of Google's form,
        from which its schema is made. Plain or `async def`.
    """

    functions: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        require(len(self.functions) > 0, "Tools.functions is empty; name at least one function")
        for function in self.functions:
            check_reference(function, "Tools.functions")


@dataclass(frozen=True)
class Environment(Turns):
    """A class of the user's, one instance an episode.

    Either `reset(record, seed)` and `step(reply)`, or public methods that are tools beside `reset` and `get_reward`;
    see `jaxrlhf.environments`.

    Attributes:
      factory: Class, or function that makes an instance, as `module:name` or `path/to/file.py:name`.
      episodes_per_process: Instances that share a process; alone each takes about 3 MB. A call that hangs or crashes
        costs all of its process, and they wait for each other.
    """

    factory: str = ""
    episodes_per_process: Positive[int] = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_reference(self.factory, "Environment.factory")


@dataclass(frozen=True)
class Agent(Episodes):
    """A program of the user's that talks to the policy as to OpenAI's API.

    What it does between its calls, tools among it, is its own. `Rollout.max_response_tokens` bounds the tokens that are
    drawn for it. Programs that are under way have a process each, however many they are.

    Attributes:
      program: Function `run(session, record)`, plain or `async def`, that returns a score or None, as `module:function`
        or `path/to/file.py:function`; `session.base_url` and `session.api_key` are what a client is given.
    """

    program: str = ""
    episode_s: Positive[float] | None = field(default=3600.0, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_reference(self.program, "Agent.program")


@dataclass(frozen=True)
class EnvironmentByRecord(Settings):
    """Several environments in a run, chosen by a field of the record.

    Attributes:
      field: Field of the record that has the environment's name.
    """

    field: str
    choices: tuple[Tools | Environment | Agent, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        require(len(self.choices) > 0, "EnvironmentByRecord.choices is empty; give at least one environment")
        names = Counter(choice.name for choice in self.choices)
        require(
            "" not in names and max(names.values()) == 1,
            f"EnvironmentByRecord.choices need a name each, all different, got {sorted(names.elements())}",
        )


AnyEnvironment = Tools | Environment | Agent | EnvironmentByRecord


def choices(environment: AnyEnvironment) -> tuple[Tools | Environment | Agent, ...]:
    """The environments of a run."""
    return environment.choices if isinstance(environment, EnvironmentByRecord) else (environment,)


def choice(environment: AnyEnvironment, record: object) -> int:
    """Number of the environment that a record is for.

    Raises:
      Refusal: The record names none of them.
    """
    if not isinstance(environment, EnvironmentByRecord):
        return 0
    names = [one.name for one in environment.choices]
    given: Any = record.get(environment.field) if hasattr(record, "get") else None
    require(
        given in names,
        f"a record's field {environment.field!r} is {given!r}, and the environments are {', '.join(names)}; "
        "name one of them in every record",
    )
    return names.index(given)
