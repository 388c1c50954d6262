"""HTTP protocols of vLLM and SGLang servers: token ids in requests and in replies, never text.

Source: the request and response models of vLLM 0.27 and later (`/v1/completions`; `/collective_rpc`,
`/reset_prefix_cache`, `/update_weight_version`, `/weight_info` with `VLLM_SERVER_DEV_MODE=1`) and of SGLang
(`/generate`, `/update_weights_from_disk`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from jaxrlhf.config import Sampling


class ServerResponse(NamedTuple):
    """Response of a server.

    Attributes:
      truncated: True if the length limit ended the response.
      weights: Name of the weights that the server reports to have sampled with; None if it reports none.
    """

    tokens: tuple[int, ...]
    logps: tuple[float, ...]
    truncated: bool
    weights: str | None


@dataclass(frozen=True)
class ResponseEnds:
    """End conditions of one response.

    Attributes:
      stop_tokens: Ids that end the response and are kept in it.
      stop_texts: Texts that end the response; the token that completes a text is kept.
    """

    max_tokens: int
    stop_tokens: Sequence[int]
    stop_texts: Sequence[str]


class ServerProtocol(Protocol):
    """Protocol of one kind of server; a request is a path and a JSON body.

    Attributes:
      weights_path: Path that reports the name of the loaded weights as `weight_version`; None if responses report it.
    """

    weights_path: str | None

    def generate(
        self, prompt_tokens: Sequence[int], sampling: Sampling, ends: ResponseEnds, *, seed: int
    ) -> tuple[str, dict[str, Any]]:
        """Return the request for one response."""

    def answer(self, reply: Any) -> ServerResponse:
        """Parse the response in a reply.

        Raises:
          LookupError, TypeError, ValueError: The reply has another form.
        """

    def reload(self, folder: Path) -> list[tuple[str, dict[str, Any]]]:
        """Return the requests that make the server load a checkpoint folder and drop caches of older weights.

        The folder is also the name of the weights.
        """

    def check_reloaded(self, reply: Any) -> None:
        """Raise `ValueError` if a reply to a `reload` request reports a failure."""


class Vllm:
    """Protocol of vLLM, on GPU, CPU or TPU."""

    weights_path: str | None = "/weight_info"

    def generate(
        self, prompt_tokens: Sequence[int], sampling: Sampling, ends: ResponseEnds, *, seed: int
    ) -> tuple[str, dict[str, Any]]:
        body = {
            "prompt": list(prompt_tokens),
            "max_tokens": ends.max_tokens,
            "min_tokens": min(sampling.min_tokens, ends.max_tokens),
            "top_k": sampling.top_k or 0,
            "seed": seed,
            "logprobs": 0,  # of the sampled token only
            "return_token_ids": True,
            "add_special_tokens": False,
        }
        return "/v1/completions", body | _settings_of_both(sampling, ends)

    def answer(self, reply: Any) -> ServerResponse:
        [choice] = reply["choices"]
        logps = tuple(float(logp) for logp in choice["logprobs"]["token_logprobs"])
        return ServerResponse(tuple(choice["token_ids"]), logps, _is_cut(choice["finish_reason"]), None)

    def reload(self, folder: Path) -> list[tuple[str, dict[str, Any]]]:
        load = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        named = {"new_version": str(folder)}
        return [("/collective_rpc", load), ("/reset_prefix_cache", {}), ("/update_weight_version", named)]

    def check_reloaded(self, reply: Any) -> None:
        if reply and reply.get("success") is False:  # requests of other clients hold the cache
            raise ValueError(
                "the server still uses keys and values of older weights; check that no other run uses the server"
            )


class Sglang:
    """Protocol of SGLang."""

    weights_path: str | None = None

    def generate(
        self, prompt_tokens: Sequence[int], sampling: Sampling, ends: ResponseEnds, *, seed: int
    ) -> tuple[str, dict[str, Any]]:
        settings = {
            "max_new_tokens": ends.max_tokens,
            "min_new_tokens": min(sampling.min_tokens, ends.max_tokens),
            "top_k": sampling.top_k or -1,
            "sampling_seed": seed,
            **_settings_of_both(sampling, ends),
        }
        body = {"input_ids": list(prompt_tokens), "sampling_params": settings, "return_logprob": True}
        return "/generate", body

    def answer(self, reply: Any) -> ServerResponse:
        about = reply["meta_info"]
        sampled = about["output_token_logprobs"]
        tokens, logps = tuple(int(token) for _, token, *_ in sampled), tuple(float(logp) for logp, *_ in sampled)
        return ServerResponse(tokens, logps, _is_cut(about["finish_reason"]["type"]), about.get("weight_version"))

    def reload(self, folder: Path) -> list[tuple[str, dict[str, Any]]]:
        return [("/update_weights_from_disk", {"model_path": str(folder), "weight_version": str(folder)})]

    def check_reloaded(self, reply: Any) -> None:
        if not reply["success"]:
            raise ValueError(str(reply.get("message")))


def _settings_of_both(sampling: Sampling, ends: ResponseEnds) -> dict[str, Any]:
    """Return the settings with the same names in both servers.

    Penalties are explicit: vLLM would take them from `generation_config.json`, such as Qwen2.5's 1.05.
    """
    return {
        "temperature": 0.0 if sampling.greedy else sampling.temperature,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "stop_token_ids": list(ends.stop_tokens),
        "stop": list(ends.stop_texts),
        "ignore_eos": sampling.ignore_eos,
        "skip_special_tokens": False,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
    }


def _is_cut(reason: str) -> bool:
    """Return True if the length limit ended a response; raise `ValueError` if the server aborted it."""
    if reason not in ("stop", "length"):
        raise ValueError(f"the server aborted the response: {reason}")
    return reason == "length"


PROTOCOLS: dict[str, ServerProtocol] = {"vllm": Vllm(), "sglang": Sglang()}
"""Protocols by `RolloutServer.api`."""
