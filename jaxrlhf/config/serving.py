"""Settings of a server of completions, and of the sessions that agents have with it."""

from dataclasses import dataclass

from jaxrlhf.config.settings import Finite, Positive, Settings


@dataclass(frozen=True, kw_only=True)
class ServingLimits(Settings):
    """Limits of a server; what exceeds one is answered with an error that names it.

    Attributes:
      requests: Requests under way at once, those that wait for a slot included.
      choices: Choices of a request (`n`), of all its prompts together.
      body_bytes: Bytes of a request.
      body_s: Seconds for a request to arrive.
      request_s: Seconds for an answer; it is cancelled then.
    """

    requests: Positive[int] = 1024
    choices: Positive[int] = 64
    body_bytes: Positive[int] = 1 << 22
    body_s: Finite[Positive[float]] = 30.0
    request_s: Finite[Positive[float]] = 600.0


@dataclass(frozen=True, kw_only=True)
class SessionLimits(Settings):
    """Limits of a session; None is none.

    Attributes:
      calls: Choices that are drawn in it.
      tokens: Tokens that are drawn in it.
      call_tokens: Tokens of a choice.
    """

    calls: Positive[int] | None = None
    tokens: Positive[int] | None = None
    call_tokens: Positive[int] | None = None
