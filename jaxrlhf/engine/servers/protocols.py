"""HTTP protocols of vLLM and SGLang servers: token ids in requests and in replies, never text.

Source: the request and response models of vLLM 0.32.0 and of SGLang 0.5.23. In vLLM's `entrypoints/`: `/v1/completions`
(`openai/completion/protocol.py`); `/inference/v1/generate` (`scale_out/token_in_token_out/protocol.py`), with
`--enable-scale-out`; `/collective_rpc` and `/reset_prefix_cache` (`serve/dev/`), `/update_weight_version` and
`/weight_info` (`rl/online/api_router.py`), with `VLLM_SERVER_DEV_MODE=1`. In SGLang's `srt/`: `/generate`,
`/update_weights_from_disk` and `/model_info` (`managers/io_struct.py`, `entrypoints/http_server.py`).
"""

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from jaxrlhf.config import Sampling


@dataclass(frozen=True)
class ServerRequest:
    """Request to a server for one response.

    Attributes:
      prompt_tokens: Token ids; one placeholder token stands for each image.
      images: Images of the prompt, in order, as data URLs.
      stop_tokens: Ids that end the response and are kept in it.
      stop_texts: Texts that end the response; the token that completes a text is kept.
      routing: True asks for the experts of each token.
    """

    prompt_tokens: Sequence[int]
    images: Sequence[str]
    sampling: Sampling
    max_tokens: int
    stop_tokens: Sequence[int]
    stop_texts: Sequence[str]
    seed: int
    routing: bool


class ServerResponse(NamedTuple):
    """Response of a server.

    Attributes:
      truncated: True if the length limit ended the response.
      weights: Name of the weights that the server reports to have sampled with; None if it reports none.
      prompt_tokens: Prompt in which a placeholder token stands for each feature of an image; None if not reported.
      experts: Experts of each token but the last, in all layers, in the order tokens, layers, choices; None if not
        reported.
    """

    tokens: tuple[int, ...]
    logps: tuple[float, ...]
    truncated: bool
    weights: str | None = None
    prompt_tokens: tuple[int, ...] | None = None
    experts: np.ndarray | None = None


@runtime_checkable
class ServerProtocol(Protocol):
    """Protocol of one kind of server; a request is a path and a JSON body.

    Attributes:
      weights_path: Path that reports the name of the loaded weights as `weight_version`.
      images_flag, routing_flag: What a server needs to take images, and to report experts.
    """

    weights_path: str
    images_flag: str
    routing_flag: str

    def generate(self, request: ServerRequest) -> tuple[str, dict[str, Any]]:
        """Return the request for one response."""

    def answer(self, reply: Any) -> ServerResponse:
        """Parse the response in a reply.

        Raises:
          LookupError, TypeError, ValueError: The reply has another form.
        """

    def reload(self, folder: Path) -> list[tuple[str, dict[str, Any]]]:
        """Return the requests that make the server load the tensors in a folder and drop caches of older weights.

        The server keeps its tensors of layers that the folder lacks. The folder is also the name of the weights.
        """

    def check_reloaded(self, reply: Any) -> None:
        """Raise `ValueError` if a reply to a `reload` request reports a failure."""


class Vllm:
    """Protocol of vLLM, on GPU, CPU or TPU."""

    weights_path = "/weight_info"
    images_flag = "--enable-scale-out"
    routing_flag = "--enable-return-routed-experts"

    def generate(self, request: ServerRequest) -> tuple[str, dict[str, Any]]:
        settings = {
            "max_tokens": request.max_tokens,
            "min_tokens": min(request.sampling.min_tokens, request.max_tokens),
            "top_k": request.sampling.top_k or 0,
            "seed": request.seed,
            "logprobs": 0,  # of the sampled token only
            **_settings_of_both(request),
        }
        tokens = list(request.prompt_tokens)
        if not request.images:
            body = {"prompt": tokens, "return_token_ids": True, "add_special_tokens": False}
            return "/v1/completions", body | settings
        parts = [{"type": "image_url", "url": url} for url in request.images]
        body = {"token_ids": tokens, "content_parts": parts, "return_token_ids": True, "sampling_params": settings}
        return "/inference/v1/generate", body

    def answer(self, reply: Any) -> ServerResponse:
        [choice] = reply["choices"]
        sampled = choice["logprobs"]
        logps = [one["logprob"] for one in sampled["content"]] if "content" in sampled else sampled["token_logprobs"]
        seen, routed = reply.get("prompt_token_ids"), choice.get("routed_experts")
        return ServerResponse(
            tuple(choice["token_ids"]),
            tuple(float(logp) for logp in logps),
            _is_cut(choice["finish_reason"]),
            prompt_tokens=None if seen is None else tuple(seen),
            experts=None if routed is None else np.load(io.BytesIO(base64.b64decode(routed))),
        )

    def reload(self, folder: Path) -> list[tuple[str, dict[str, Any]]]:
        load = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        # The reload empties the workers' cache of image features, but its scheduler still counts on them.
        caches: list[tuple[str, dict[str, Any]]] = [("/reset_prefix_cache", {}), ("/reset_encoder_cache", {})]
        return [("/collective_rpc", load), *caches, ("/update_weight_version", {"new_version": str(folder)})]

    def check_reloaded(self, reply: Any) -> None:
        if reply and reply.get("success") is False:  # requests of other clients hold the cache
            raise ValueError(
                "the server still uses keys and values of older weights; check that no other run uses the server"
            )


class Sglang:
    """Protocol of SGLang."""

    weights_path = "/model_info"
    images_flag = "SGLANG_MM_AVOID_RETOKENIZE=1, its default"
    routing_flag = "--enable-return-routed-experts"

    def generate(self, request: ServerRequest) -> tuple[str, dict[str, Any]]:
        settings = {
            "max_new_tokens": request.max_tokens,
            "min_new_tokens": min(request.sampling.min_tokens, request.max_tokens),
            "top_k": request.sampling.top_k or -1,
            "sampling_seed": request.seed,
            **_settings_of_both(request),
        }
        body = {"input_ids": list(request.prompt_tokens), "sampling_params": settings, "return_logprob": True}
        if request.images:
            body |= {"image_data": list(request.images), "return_prompt_token_ids": True}
        if request.routing:
            body["return_routed_experts"] = True
        return "/generate", body

    def answer(self, reply: Any) -> ServerResponse:
        about = reply["meta_info"]
        sampled = about["output_token_logprobs"]
        seen, routed = reply.get("prompt_token_ids"), about.get("routed_experts")
        return ServerResponse(
            tuple(int(token) for _, token, *_ in sampled),
            tuple(float(logp) for logp, *_ in sampled),
            _is_cut(about["finish_reason"]["type"]),
            about.get("weight_version"),
            prompt_tokens=None if seen is None else tuple(seen),
            experts=None if routed is None else np.frombuffer(base64.b64decode(routed), np.int32),
        )

    def reload(self, folder: Path) -> list[tuple[str, dict[str, Any]]]:
        return [("/update_weights_from_disk", {"model_path": str(folder), "weight_version": str(folder)})]

    def check_reloaded(self, reply: Any) -> None:
        if not reply["success"]:
            raise ValueError(str(reply.get("message")))


def _settings_of_both(request: ServerRequest) -> dict[str, Any]:
    """Return the settings with the same names in both servers.

    Penalties are explicit: vLLM would take them from `generation_config.json`, such as Qwen2.5's 1.05.
    """
    sampling = request.sampling
    return {
        "temperature": 0.0 if sampling.greedy else sampling.temperature,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "stop_token_ids": list(request.stop_tokens),
        "stop": list(request.stop_texts),
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
