"""Types of an episode: messages, tool calls, replies of a policy, answers of an environment, and causes of the end.

User code for environments and tools only needs this module. It imports nothing heavy, because environment processes
import it.
"""

import hashlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, get_args
from weakref import WeakValueDictionary

Message = Mapping[str, Any]
"""Message as chat templates read it: `role` and `content`, and `tool_calls`, `tool_call_id`, `name`."""

Content = str | list[dict[str, Any]]
"""Content of a message: a text, or a list of parts, each a text or an image.

Parts are `{"type": "text", "text": ...}` and `{"type": "image", "image": ...}` with a PIL image, encoded bytes or a
data URL. Image parts are converted to OpenAI's `{"type": "image_url", "image_url": {"url": ...}}`; in episode records
the URL is a `ShownImage`.
"""

ToolSchema = Mapping[str, Any]
"""JSON schema of a function, in OpenAI's form: `{"type": "function", "function": {"name", "description", ...}}`."""

StopCause = Literal[
    "answered",  # a reply without tool calls, in an environment of tools alone
    "done",  # reported by the environment
    "turns",
    "tokens_of_turn",  # a reply was truncated at its limit
    "tokens_of_episode",
    "tool_calls",
    "malformed_call",  # if the settings end an episode at malformed calls
    "environment_truncated",  # the environment gave up, like gymnasium's `truncated`
    "episode_timeout",
    "environment_timeout",
    "environment_error",
]
STOP_CAUSES: tuple[StopCause, ...] = get_args(StopCause)

TRUNCATIONS: frozenset[StopCause] = frozenset(
    ["turns", "tokens_of_turn", "tokens_of_episode", "tool_calls", "environment_truncated", "episode_timeout"]
)
"""Stop causes that are limits; the episode could have continued."""

FAILURES: frozenset[StopCause] = frozenset(["environment_timeout", "environment_error"])
"""Stop causes that are not the policy's fault; such an episode is unscorable."""

FailureCause = Literal[
    "timeout",
    "crash",
    "exception",
    "wrong-type",
    "not-finite",
    "output",
    "unpicklable",
    "none",  # of rewards alone
    "not-a-number",  # of rewards alone
]
"""Kinds of failures of user code, for counting; `crash` is a process that died."""


class EnvironmentFailure(Exception):
    """Error: a user's environment or agent program did not answer.

    Attributes:
      cause: Kind of failure.
      detail: One line for users.
    """

    def __init__(self, cause: FailureCause, detail: str) -> None:
        super().__init__(f"{cause}: {detail}")
        self.cause, self.detail = cause, detail


class ShownImage:
    """Image shown in an episode, identified by its content; images with equal content are one object per process.

    The content stays in the process that showed it first. Hosts joined by Ray exchange only its location, and load the
    content where they compute with it; any other pickle contains the content.

    Attributes:
      digest: Text that differs if the content differs.
      load: Function that returns the content, a data URL.
      keep: Function from a data URL to its `load`; replaced in processes that store contents elsewhere.

    Args:
      load: See above.
    """

    keep: ClassVar[Callable[[str], Callable[[], str]]] = staticmethod(lambda url: lambda: url)
    _known: ClassVar["WeakValueDictionary[str, ShownImage]"] = WeakValueDictionary()

    def __init__(self, digest: str, load: Callable[[], str]) -> None:
        self.digest, self.load = digest, load

    @classmethod
    def of(cls, url: str) -> "ShownImage":
        """Return the image of a data URL."""
        digest = hashlib.blake2b(url.encode(), digest_size=16).hexdigest()
        return cls._known.get(digest) or cls.elsewhere(digest, cls.keep(url))

    @classmethod
    def elsewhere(cls, digest: str, load: Callable[[], str]) -> "ShownImage":
        """Return the image with a digest, and set its `load`."""
        found = cls._known.setdefault(digest, cls(digest, load))
        found.load = load
        return found

    def __reduce__(self) -> tuple[Any, ...]:
        return ShownImage.of, (self.load(),)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ShownImage) and other.digest == self.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __str__(self) -> str:
        return f"shown:{self.digest}"

    def __format__(self, form: str) -> str:
        return format(str(self), form)


@dataclass(frozen=True)
class ToolCall:
    """Tool call requested by the policy, well-formed and with arguments that fit the tool's schema.

    Attributes:
      call_id: Name of the call within its episode.
    """

    name: str
    arguments: Mapping[str, Any]
    call_id: str = ""


@dataclass(frozen=True)
class MalformedCall:
    """Tool call that cannot be made.

    Attributes:
      kind: `structure` is text that is not a call (unclosed, not JSON); `unknown_tool` is a call of a tool that does
        not exist; `arguments` is a call with arguments that do not fit the tool's schema.
      detail: Line for the policy with advice on what to do instead.
    """

    kind: Literal["structure", "unknown_tool", "arguments"]
    detail: str


@dataclass(frozen=True)
class Reply:
    """Turn of the policy.

    Attributes:
      text: Text of the whole reply, without control tokens.
      content: Text without reasoning and calls; a malformed call stays in it as written.
      tokens: Sampled tokens, the end-of-turn token included.
      ended: True if the policy ended the turn itself; False if it was truncated at a limit.
      reasoned: True if the reply has a reasoning block, even an empty one.
    """

    text: str
    content: str
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()
    malformed: tuple[MalformedCall, ...] = ()
    tokens: tuple[int, ...] = ()
    ended: bool = True
    reasoned: bool = False

    @property
    def message(self) -> dict[str, Any]:
        """Reply as a message of the assistant."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.calls:
            message["tool_calls"] = [
                {"type": "function", "id": c.call_id, "function": {"name": c.name, "arguments": dict(c.arguments)}}
                for c in self.calls
            ]
        return message


@dataclass(frozen=True)
class Opening:
    """Beginning of an episode.

    Attributes:
      messages: Messages of the prompt; empty uses the record's prompt.
      tools: Schemas of the tools that the policy is shown.
      appended: Text appended to the prompt's last message, like TRL does with the return value of `reset`.
      state, max_tokens: Anchor and token limit of the first reply; see `Observation`.
    """

    messages: Sequence[Message] = ()
    tools: Sequence[ToolSchema] = ()
    appended: str = ""
    state: Hashable = None
    max_tokens: int | None = None


@dataclass(frozen=True)
class Session:
    """Address of the policy, for an agent program in one episode.

    Attributes:
      base_url: Base URL for clients of OpenAI's API.
      api_key: Key that identifies the program's calls as calls of this episode.
      record: Data record of the episode.
      seed: Seed, equal for all episodes of a group.
    """

    base_url: str
    api_key: str
    record: Mapping[str, Any]
    seed: int


@dataclass(frozen=True)
class CallRecord:
    """Record of a tool call that was made.

    Attributes:
      failure: Kind of failure; None if the tool answered.
    """

    name: str
    seconds: float
    failure: FailureCause | None = None


@dataclass(frozen=True)
class Observation:
    """Answer of an environment to a reply.

    Attributes:
      messages: Messages to the policy before its next turn; at least one unless the episode is over.
      reward: Reward at the last token of the reply; finite.
      done: True if the episode is over.
      truncated: True if the environment gives up on the episode, like gymnasium's `truncated`.
      state: Anchor of the state in which the next reply is made: GiGPO compares replies of a group that are made in
        equal states. None is no anchor.
      metrics: Numbers by name, averaged over the episodes of the step.
      max_tokens: Maximum number of tokens of the next reply; None uses the setting.
      calls: Tool calls that were made, for metrics; filled in by the run for environments of tools.
    """

    messages: Sequence[Message] = ()
    reward: float = 0.0
    done: bool = False
    truncated: bool = False
    state: Hashable = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    max_tokens: int | None = None
    calls: Sequence[CallRecord] = ()


@dataclass(frozen=True)
class TurnRecord:
    """Record of a reply and the environment's answer.

    Attributes:
      observed: Messages that the environment answered with.
      reward: Reward of the environment for the reply.
      policy_s, environment_s: Seconds taken by the reply and by the environment's answer, waiting included.
    """

    reply: Reply
    observed: Sequence[Message] = ()
    reward: float = 0.0
    policy_s: float = 0.0
    environment_s: float = 0.0
    calls: Sequence[CallRecord] = ()


@dataclass(frozen=True)
class EpisodeRecord:
    """Record of an episode, for rewards, samples and metrics.

    Attributes:
      opening: Messages of the first prompt.
      stop: Cause of the end.
      environment: Index of the environment among those of the run.
      failure: Line on the environment's failure; empty without a failure.
      environment_reward: Sum of the environment's rewards; None if the environment gives none.
      metrics: Last value of each of the environment's metrics.
      forks: Number of sequences that start anew, by cause, such as a template that rewrites history.
    """

    opening: Sequence[Message]
    turns: Sequence[TurnRecord]
    stop: StopCause
    environment: int = 0
    failure: str = ""
    environment_reward: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    forks: Mapping[str, int] = field(default_factory=dict)

    @property
    def messages(self) -> list[Message]:
        """Messages of the whole conversation."""
        exchanged = [message for turn in self.turns for message in (turn.reply.message, *turn.observed)]
        return [*self.opening, *exchanged]

    @property
    def answer(self) -> str:
        """Text of the last reply; empty if there is none."""
        return self.turns[-1].reply.text if self.turns else ""
