"""Settings of environments: tools, environment classes and agent programs."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from jaxrlhf.config.refusal import require
from jaxrlhf.config.settings import REFERENCE, Finite, NotEmpty, Positive, Reference, Settings, each


@dataclass(frozen=True, kw_only=True)
class Episodes(Settings):
    """Base class of environments: limits of episodes and of the processes that run them.

    Attributes:
      name: Name in metrics; with several environments also the value of the record's field that chooses this
        environment.
      max_turns: Largest number of replies of the policy in an episode.
      turn_tokens: Largest number of tokens of a reply; None is the remaining tokens of the episode.
      episode_s: Wall-clock limit of an episode in seconds; None is unlimited.
      truncated: Treatment of episodes that a limit ended: `score` keeps the score, `zero` sets the score to 0,
        `leave_out` leaves the episode out of training.
      history: Context of the next turn. `as_sampled` keeps all tokens as they were sampled. `as_templated` applies the
        chat template to all messages again; the template may drop earlier reasoning, and every change of earlier text
        starts another token sequence.
      memory_bytes: Address space, in bytes, that a process may use in addition to its size after loading the user's
        code.
      output_bytes: Largest amount of text, in bytes, that a call may return or print.
      in_flight: Largest number of episodes in progress; None is all episodes of a step.
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

    `Rollout.max_response_tokens` limits all tokens after the first prompt of an episode, replies and observations
    together.

    Attributes:
      max_calls: Largest number of tool calls in an episode.
      observation_tokens: Largest number of tokens of the answer to a reply. Longer text is truncated, with a note to
        the policy.
      call_s: Wall-clock limit in seconds of one tool call or one method call of an environment; its process is then
        killed.
      malformed_calls: Handling of malformed tool calls: `answer` replies with an error message, `end` ends the episode.
      cut_turns: Handling of replies truncated at `turn_tokens`: `end` ends the episode, `close` appends an end-of-turn
        token that is not trained on.
      workers: Largest number of concurrent calls of tools or environments, each in its own process.
    """

    max_calls: Positive[int] = 64
    observation_tokens: Positive[int] = 512
    call_s: Finite[Positive[float]] = 10.0
    malformed_calls: Literal["answer", "end"] = "answer"
    cut_turns: Literal["end", "close"] = "end"
    workers: Positive[int] = 64


@dataclass(frozen=True)
class Tools(Turns):
    """Functions that the policy may call; an episode ends with a reply that calls none of them.

    Attributes:
      functions: Functions, each as `module:function` or `path/to/file.py:function`, plain or `async def`. The tool
        schema is made from the type hints and the Google-style docstring.
    """

    functions: Annotated[tuple[str, ...], each(REFERENCE)] = ()


@dataclass(frozen=True)
class Environment(Turns):
    """Environment class of your own, with one instance per episode.

    The class has either `reset(record, seed)` and `step(reply)`, or `reset`, `get_reward` and further public methods,
    which are the tools. See `jaxrlhf.environments`.

    Attributes:
      factory: Class, or function that makes an instance, as `module:name` or `path/to/file.py:name`.
      episodes_per_process: Number of instances that share a process; a process takes about 3 MB. Instances of one
        process wait for each other, and a call that hangs or crashes ends all episodes of its process.
    """

    factory: Reference = ""
    episodes_per_process: Positive[int] = 1


@dataclass(frozen=True)
class Agent(Episodes):
    """Agent program of your own, which calls the policy through an OpenAI-compatible API.

    The program runs its own tools between calls. `Rollout.max_response_tokens` limits the tokens sampled for an
    episode. Every running program has its own process; their number is not limited.

    Attributes:
      program: Function `run(session, record)`, plain or `async def`, as `module:function` or
        `path/to/file.py:function`. It returns a score or None. Clients connect with `session.base_url` and
        `session.api_key`.
    """

    program: Reference = ""
    episode_s: Positive[float] | None = field(default=3600.0, kw_only=True)


@dataclass(frozen=True)
class EnvironmentByRecord(Settings):
    """Several environments in one run, chosen by a field of each record.

    Attributes:
      field: Field of the record with the name of the environment.
    """

    field: str
    choices: NotEmpty[tuple[Tools | Environment | Agent, ...]]

    def __post_init__(self) -> None:
        super().__post_init__()
        names = Counter(choice.name for choice in self.choices)
        require(
            "" not in names and max(names.values()) == 1,
            f"EnvironmentByRecord.choices require different names, got {sorted(names.elements())}",
        )


AnyEnvironment = Tools | Environment | Agent | EnvironmentByRecord


def choices(environment: AnyEnvironment) -> tuple[Tools | Environment | Agent, ...]:
    """Return the environments of a run."""
    return environment.choices if isinstance(environment, EnvironmentByRecord) else (environment,)


def choice(environment: AnyEnvironment, record: object) -> int:
    """Return the index of the environment that a record is for.

    Raises:
      Refusal: The record names none of the environments.
    """
    if not isinstance(environment, EnvironmentByRecord):
        return 0
    names = [one.name for one in environment.choices]
    given: Any = record.get(environment.field) if hasattr(record, "get") else None
    require(
        given in names,
        f"a record has {environment.field!r}: {given!r}, but the environments are {', '.join(names)}; set the field "
        "to one of them in every record",
    )
    return names.index(given)
