"""Settings of a server of completions, of the sessions that agents have with it, and of servers that runs ask."""

from dataclasses import dataclass
from typing import Literal

from jaxrlhf.config.refusal import require
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


@dataclass(frozen=True)
class RolloutServer(Settings):
    """Servers of another engine that generate a run's responses: token ids and log-probabilities come back.

    Attributes:
      urls: Addresses, such as `http://localhost:8000`, of servers with one model; a prompt's responses come from one.
      api: Kind of server. vLLM from 0.27 on, on GPU, CPU or TPU, is started with `VLLM_SERVER_DEV_MODE=1`, so that it
        loads weights when it is asked to, and `--logprobs-mode processed_logprobs`, so that the temperature counts.
      folder: Folder on a file system that run and servers share, for one checkpoint of the newest weights, in
        `<name of the run>/server_weights` there; None is `server_weights` in the run's workdir.
      concurrency: Requests under way at once.
      request_s: Limit of a response, repeated requests included. Time-outs, 429 and 5xx are tried again.
      reload_s: Limit of loading weights.
      api_key_env: Environment variable that holds the key; the key itself is never written anywhere.
    """

    urls: tuple[str, ...]
    api: Literal["vllm", "sglang"] = "vllm"
    folder: str | None = None
    concurrency: Positive[int] = 256
    request_s: Finite[Positive[float]] = 600.0
    reload_s: Finite[Positive[float]] = 600.0
    api_key_env: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        require(len(self.urls) > 0, "RolloutServer.urls names no server; give at least one address")
        require(len(set(self.urls)) == len(self.urls), f"RolloutServer.urls names a server twice: {self.urls}")
        for url in self.urls:
            require(
                url.startswith(("http://", "https://")) and not url.endswith(("/", "/v1")),
                f"RolloutServer.urls are addresses without a path, such as 'http://localhost:8000', got {url!r}",
            )


def check_server(*, episodes: bool, hosts: bool) -> None:
    """Refuse what a run with a `RolloutServer` cannot do.

    Args:
      episodes: The run goes through episodes.
      hosts: The run is on hosts joined by Ray.
    """
    require(
        not episodes,
        "rollout.server generates responses to prompts, and episodes keep keys and values from turn to turn in the "
        "run's own engine; drop rollout.server or environment",
    )
    require(
        not hosts,
        "rollout.server is asked by one process, which writes its weights, and cluster has one on every host; drop one",
    )
