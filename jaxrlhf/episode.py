"""Words of an episode: messages, tool calls, a policy's replies, what an environment answers, and why it ended.

Environments and tools of a user's own are written against this module alone. It imports nothing heavy, because their
processes do.
"""

import hashlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, get_args
from weakref import WeakValueDictionary

Message = Mapping[str, Any]
"""A message as chat templates read it: `role` and `content`, and `tool_calls`, `tool_call_id`, `name`."""

Content = str | list[dict[str, Any]]
"""Content of a message: a text, or parts, each a text or an image.

Parts are `{"type": "text", "text": ...}` and `{"type": "image", "image": ...}`, an image of PIL, encoded bytes or a
data URL; afterwards they are OpenAI's `{"type": "image_url", "image_url": {"url": ...}}`, and in records of episodes
the URL is a `ShownImage`.
"""

ToolSchema = Mapping[str, Any]
"""JSON schema of a function, in OpenAI's form: `{"type": "function", "function": {"name", "description", ...}}`."""

StopCause = Literal[
    "answered",  # a reply without tool calls, in an environment of tools alone
    "done",  # the environment said so
    "turns",
    "tokens_of_turn",  # a reply was cut at its limit
    "tokens_of_episode",
    "tool_calls",
    "malformed_call",  # of which the settings say that it ends an episode
    "environment_truncated",  # the environment gave up, as gymnasium's `truncated`
    "episode_timeout",
    "environment_timeout",
    "environment_error",
]
STOP_CAUSES: tuple[StopCause, ...] = get_args(StopCause)

TRUNCATIONS: frozenset[StopCause] = frozenset(
    ["turns", "tokens_of_turn", "tokens_of_episode", "tool_calls", "environment_truncated", "episode_timeout"]
)
"""Ends that a limit made, of an episode that might have gone on."""

FAILURES: frozenset[StopCause] = frozenset(["environment_timeout", "environment_error"])
"""Ends that are no fault of the policy's; such an episode is unscorable."""

FailureCause = Literal["timeout", "crash", "exception", "wrong-type", "not-finite", "output", "unpicklable"]
"""Kinds of failures of a tool or environment, for counting; as with rewards, `crash` is a process that went down."""


class EnvironmentFailure(Exception):
    """Error: an environment or agent of the user's did not answer.

    Attributes:
      cause: Kind of failure.
      detail: One line for a person.
    """

    def __init__(self, cause: FailureCause, detail: str) -> None:
        super().__init__(f"{cause}: {detail}")
        self.cause, self.detail = cause, detail


class ShownImage:
    """Image that an episode showed, by its content: one object a process for all that show the same.

    The content is where it was shown first. Hosts that Ray joins hand on where that is, and load the content where they
    compute with it; any other pickle holds it.

    Attributes:
      digest: Text that is another one for another content.
      load: Gives the content, a data URL.
      keep: Function of a data URL to its `load`; set where a process keeps contents elsewhere.

    Args:
      load: See above.
    """

    keep: ClassVar[Callable[[str], Callable[[], str]]] = staticmethod(lambda url: lambda: url)
    _known: ClassVar["WeakValueDictionary[str, ShownImage]"] = WeakValueDictionary()

    def __init__(self, digest: str, load: Callable[[], str]) -> None:
        self.digest, self.load = digest, load

    @classmethod
    def of(cls, url: str) -> "ShownImage":
        """The image of a data URL."""
        digest = hashlib.blake2b(url.encode(), digest_size=16).hexdigest()
        return cls._known.get(digest) or cls.elsewhere(digest, cls.keep(url))

    @classmethod
    def elsewhere(cls, digest: str, load: Callable[[], str]) -> "ShownImage":
        """The image of a digest, which is loaded so from now on."""
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
    """A call that the policy asked for, well-formed and with arguments that fit the tool's schema.

    Attributes:
      call_id: Name of the call within its episode.
    """

    name: str
    arguments: Mapping[str, Any]
    call_id: str = ""


@dataclass(frozen=True)
class MalformedCall:
    """A call that cannot be made.

    Attributes:
      kind: `structure` is text that is no call (unclosed, not JSON); `unknown_tool` and `arguments` are calls of a tool
        that is not there, or with arguments that do not fit its schema.
      detail: Line for the policy that says what to do instead.
    """

    kind: Literal["structure", "unknown_tool", "arguments"]
    detail: str


@dataclass(frozen=True)
class Reply:
    """One turn of the policy.

    Attributes:
      text: All that it wrote, without control tokens.
      content: The text beside reasoning and calls; a call that cannot be made stands in it as it was written.
      tokens: What it drew, its end-of-turn token included.
      ended: It ended its turn itself, and was not cut at a limit.
      reasoned: It has a place for reasoning, be it empty.
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
        """The reply as a message of the assistant."""
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
      messages: The prompt; none is the record's own.
      tools: Schemas of the tools that the policy is shown.
      appended: Text to put behind that of the prompt's last message, as TRL does with what `reset` returns.
      state, max_tokens: Anchor and limit of the first reply; see `Observation`.
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
      base_url: Address as clients of OpenAI's API take it.
      api_key: Key by which the program's calls are known to be of this episode.
      record: Record of the data.
      seed: The same for all episodes of a group.
    """

    base_url: str
    api_key: str
    record: Mapping[str, Any]
    seed: int


@dataclass(frozen=True)
class CallRecord:
    """A tool call that was made.

    Attributes:
      failure: Kind of failure; None is an answer.
    """

    name: str
    seconds: float
    failure: FailureCause | None = None


@dataclass(frozen=True)
class Observation:
    """Answer of an environment to a reply.

    Attributes:
      messages: What the policy is told before its next turn; must hold one at least unless the episode is over.
      reward: Paid at the last token of the reply; finite.
      done: The episode is over.
      truncated: The environment gives up on it, as gymnasium has it.
      state: Anchor of the state that the next reply is made in: replies of a group that are made in equal states are
        compared with each other by GiGPO. None is no anchor.
      metrics: Numbers to average over the step's episodes, by name.
      max_tokens: Most tokens of the next reply; None is the setting's.
      calls: Tool calls that were made, for metrics; of tools the run fills them in.
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
    """A reply and what came of it.

    Attributes:
      observed: Messages that the environment answered with.
      reward: Paid for the reply by the environment.
      policy_s, environment_s: Seconds that the reply and the environment's answer took, waiting included.
    """

    reply: Reply
    observed: Sequence[Message] = ()
    reward: float = 0.0
    policy_s: float = 0.0
    environment_s: float = 0.0
    calls: Sequence[CallRecord] = ()


@dataclass(frozen=True)
class EpisodeRecord:
    """An episode as it went, for rewards, samples and metrics.

    Attributes:
      opening: The first prompt's messages.
      stop: Reason of the end.
      environment: Number of the environment among those of the run.
      failure: Line on the environment's failure; empty without one.
      environment_reward: Sum that the environment paid; None if it pays nothing.
      metrics: The environment's own numbers: the last of each name.
      forks: Sequences that begin anew, by cause, such as a template that rewrites history.
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
        """The whole conversation."""
        told = [message for turn in self.turns for message in (turn.reply.message, *turn.observed)]
        return [*self.opening, *told]

    @property
    def answer(self) -> str:
        """Text of the last reply; empty if there is none."""
        return self.turns[-1].reply.text if self.turns else ""
