"""Settings of the completion server, of agent sessions, and of external rollout servers."""

from dataclasses import dataclass
from typing import Annotated, Literal

from jaxrlhf.config.refusal import require
from jaxrlhf.config.settings import Bound, Finite, Positive, Settings, each

_ADDRESS = Bound(
    lambda url: url.startswith(("http://", "https://")) and not url.endswith(("/", "/v1")),
    "an address without a path, such as 'http://localhost:8000'",
    str,
)


@dataclass(frozen=True, kw_only=True)
class ServingLimits(Settings):
    """Limits of a server; a request above a limit gets an error that names the limit.

    Attributes:
      requests: Largest number of requests in progress, including requests whose body arrives or that wait for a slot.
      choices: Largest number of choices (`n`) of one request, over all of its prompts.
      body_bytes: Largest request body, in bytes.
      body_s: Time limit in seconds for a request to arrive.
      request_s: Time limit in seconds for an answer; the request is then canceled.
      connections: Largest number of open connections. Beyond it the connection is closed that has been
        silent for longest, if it is idle, its client does not read the answer, or sends requests ahead.
      headers_s: Time limit in seconds for the headers of a request.
    """

    requests: Positive[int] = 1024
    choices: Positive[int] = 64
    body_bytes: Positive[int] = 1 << 22
    body_s: Finite[Positive[float]] = 30.0
    request_s: Finite[Positive[float]] = 600.0
    connections: Positive[int] = 2048
    headers_s: Finite[Positive[float]] = 10.0


@dataclass(frozen=True, kw_only=True)
class SessionLimits(Settings):
    """Limits of a session; None is unlimited.

    Attributes:
      calls: Largest number of choices sampled in the session.
      tokens: Largest number of tokens sampled in the session.
      call_tokens: Largest number of tokens of one choice.
    """

    calls: Positive[int] | None = None
    tokens: Positive[int] | None = None
    call_tokens: Positive[int] | None = None


@dataclass(frozen=True)
class RolloutServer(Settings):
    """Servers of another inference engine that generate a run's responses and return token ids and log-probabilities.

    Attributes:
      urls: Addresses of servers with one model, such as `http://localhost:8000`; all responses to a prompt come from
        one server.
      api: Type of server. vLLM (0.27 or later, on GPU, CPU or TPU) has to be started with `VLLM_SERVER_DEV_MODE=1`, to
        load weights on request, and with `--logprobs-mode processed_logprobs`, to apply the temperature to
        log-probabilities. Images need `--enable-scale-out` of vLLM 0.32; `Rollout.replay_routing` needs
        `--enable-return-routed-experts` of either type.
      folder: Folder on a file system shared by the run and the servers. The checkpoint of the newest weights is written
        to `<name of the run>/server_weights` in this folder. None is `server_weights` in the workdir of the run.
      weights: Tensors that servers load before a step: a `whole` checkpoint, or only the layers with tensors that
        `changed` since the last step. A server that was restarted gets a whole checkpoint again.
      concurrency: Largest number of requests in progress.
      request_s: Time limit in seconds for a response, retries included. Time-outs, 429 and 5xx are retried.
      reload_s: Time limit in seconds for loading new weights.
      largest_gap: Largest mean difference, in nats per token, between log-probabilities of the trainer and of a server
        that has loaded new weights, compared on 16 tokens that the server samples after a fixed prompt.
      api_key_env: Environment variable with the API key; the key itself is never written anywhere.
    """

    urls: Annotated[tuple[str, ...], each(_ADDRESS)]
    api: Literal["vllm", "sglang"] = "vllm"
    folder: str | None = None
    weights: Literal["whole", "changed"] = "whole"
    concurrency: Positive[int] = 256
    request_s: Finite[Positive[float]] = 600.0
    reload_s: Finite[Positive[float]] = 600.0
    largest_gap: Finite[Positive[float]] = 0.2
    api_key_env: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        require(len(set(self.urls)) == len(self.urls), f"RolloutServer.urls has an address twice: {self.urls}")
