"""Words of an episode: messages, tool calls, a policy's replies, what an environment answers, and why it ended.

Environments and tools of a user's own are written against this module alone. It imports nothing heavy, because their
processes do.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

Message = Mapping[str, Any]
"""A message as chat templates read it: `role` and `content`, and `tool_calls`, `tool_call_id`, `name`."""

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
    "cancelled",
]
STOP_CAUSES: tuple[StopCause, ...] = get_args(StopCause)

TRUNCATIONS: frozenset[StopCause] = frozenset(
    ["turns", "tokens_of_turn", "tokens_of_episode", "tool_calls", "environment_truncated", "episode_timeout"]
)
"""Ends that a limit made, of an episode that might have gone on."""

FAILURES: frozenset[StopCause] = frozenset(["environment_timeout", "environment_error", "cancelled"])
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
      content: The text beside reasoning and calls.
      tokens: What it drew, its end-of-turn token included.
      ended: It ended its turn itself, and was not cut at a limit.
    """

    text: str
    content: str
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()
    malformed: tuple[MalformedCall, ...] = ()
    tokens: tuple[int, ...] = ()
    ended: bool = True

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
    """

    messages: Sequence[Message] = ()
    tools: Sequence[ToolSchema] = ()
    appended: str = ""


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
      calls: Tool calls that were made.
    """

    messages: Sequence[Message] = ()
    reward: float = 0.0
    done: bool = False
    truncated: bool = False
    state: Hashable = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    max_tokens: int | None = None
    calls: Sequence[CallRecord] = ()
