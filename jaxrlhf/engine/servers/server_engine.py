"""Rollout engine that calls inference servers with token ids, and gets token ids and log-probabilities back.

Weights are sent as files (`weight_files.py`). The seed of a response is made from the step's seed and its request_id,
so a server whose sampling depends on the seed alone repeats its responses. No server promises that to the last bit.
"""

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np

from jaxrlhf.batch import ROUTING, Image
from jaxrlhf.config import RolloutServer, Sampling
from jaxrlhf.engine.rollout_engine import PolicyWeights
from jaxrlhf.engine.sequence import Completion, Request
from jaxrlhf.engine.servers.protocols import PROTOCOLS, ServerProtocol, ServerRequest, ServerResponse
from jaxrlhf.engine.servers.weight_files import WeightFiles, num_bytes
from jaxrlhf.models.config import ModelConfig
from jaxrlhf.rewards.endpoint import Unreadable, get_json, post_json

PROBE_TOKENS = 8, 16
"""Numbers of prompt tokens and of sampled tokens by which new weights are compared."""

_OTHER_WEIGHTS = "check that no other run uses the server, and that the server was not restarted"


@dataclass(eq=False)
class ServerEngine:
    """Rollout engine of one or more servers of one kind, all with the same weights.

    The servers load new weights before the next request. Each server then samples a few tokens after a fixed prompt. If
    its log-probabilities of these tokens are far from the trainer's, it has other weights or computes something else,
    and the run ends.

    Attributes:
      model: Model that the servers have; replies with ids beyond its vocabulary or its experts are refused.
      files: Folders from which the servers read weights. Older ones are deleted once all servers have a newer one.
      logps: Function that returns the log-probabilities that weights give to the tokens of a sequence after its first;
        None compares no log-probabilities.
      image_url: Function that returns an image as a data URL; None if the model reads only text.
      records_routing: True records the experts of each token, as `Engine` does.
    """

    server: RolloutServer
    model: ModelConfig
    files: WeightFiles
    logps: Callable[[PolicyWeights, Sequence[int]], np.ndarray] | None
    max_response_tokens: int
    stop_tokens: Sequence[int]
    stop_texts: Sequence[str]
    image_url: Callable[[Image], str] | None = None
    records_routing: bool = False
    _waiting: PolicyWeights | None = None
    _version: int = -1
    _metrics: dict[str, float] = field(default_factory=dict)

    @property
    def protocol(self) -> ServerProtocol:
        """Protocol of the servers."""
        return PROTOCOLS[self.server.api]

    def take_metrics(self) -> dict[str, float]:
        """Return the cost of the last reload since the last call; empty if nothing was loaded."""
        metrics, self._metrics = self._metrics, {}
        return metrics

    def update_weights(self, weights: PolicyWeights) -> None:
        """Set the weights for the next requests; they are sent with the next `generate`."""
        self._waiting = weights

    def send_weights(self) -> None:
        """Write the newest weights and have every server load them, unless the servers have them.

        Raises:
          EndpointError: A server did not load them, or computes other log-probabilities.
        """
        if (weights := self._waiting) is None:
            return
        start, last = monotonic(), self.files.newest
        comparable = self.files.which == "changed" and bool(last)
        on_last = comparable and all(self._weights_of(url) == last for url in self.server.urls)
        if (folder := self.files.write(weights, on_last=on_last)) is not None:
            with ThreadPoolExecutor(len(self.server.urls)) as pool:
                list(pool.map(partial(self._reload, folder=folder), self.server.urls))
            self.files.drop_older()
            self._metrics = {"server/read_bytes": float(num_bytes(folder)), "server/reload_s": monotonic() - start}
        self._version = weights.version
        if self.logps is not None:
            for url in self.server.urls:
                self._compare(url, partial(self.logps, weights))
        self._waiting = None

    def _reload(self, url: str, *, folder: Path) -> None:
        for path, body in self.protocol.reload(folder):
            # vLLM answers 500 if it cannot read the folder, and exits then.
            reply = self._post(url + path, body, limit_s=self.server.reload_s, final=(500,))
            try:
                self.protocol.check_reloaded(reply)
            except (AttributeError, LookupError, TypeError, ValueError) as error:
                raise Unreadable(f"{url}{path} did not load {folder}: {error}") from error

    def _compare(self, url: str, logps: Callable[[Sequence[int]], np.ndarray]) -> None:
        """Raise `Unreadable` if a server's log-probabilities of tokens that it samples are far from the trainer's."""
        prompt, sampled = PROBE_TOKENS
        tokens = tuple(int(token) for token in np.linspace(1, self.model.vocab_size - 1, prompt))
        probe = Request(0, tokens, min(sampled, self.max_response_tokens), stop_tokens=(), stop_texts=())
        answer = self._complete(url, probe, Sampling(ignore_eos=True), seed=0)
        own_T = logps((*tokens, *answer.tokens))[prompt - 1 :]
        gap = float(np.abs(own_T - np.array(answer.logps)).mean())
        if not gap <= self.server.largest_gap:
            raise Unreadable(
                f"{url} has loaded version {self._version} of the weights, but its log-probabilities of "
                f"{len(answer.tokens)} sampled tokens differ from the trainer's by {gap:.3g} nats per token, expected "
                f"at most largest_gap={self.server.largest_gap}; check that the server runs the same model (vLLM: "
                "with --logprobs-mode processed_logprobs), or raise rollout.server.largest_gap"
            )

    def check_weights(self) -> None:
        """Raise `Unreadable` if a server has other weights than the sent ones, for example after a restart."""
        for url in self.server.urls:
            if (found := self._weights_of(url)) != self.files.newest:
                raise Unreadable(
                    f"{url}{self.protocol.weights_path} returned weights {found!r}, expected {self.files.newest!r}; "
                    f"{_OTHER_WEIGHTS}"
                )

    def _weights_of(self, url: str) -> Any:
        """Return the name of the weights that a server has; None if it reports no name."""
        path, how = self.protocol.weights_path, {"api_key_env": self.server.api_key_env}
        reply = get_json(url + path, total_s=self.server.request_s, **how)
        return reply.get("weight_version") if isinstance(reply, dict) else None

    def unload(self) -> None:
        """Drop weights that were not sent to the servers."""
        self._waiting = None

    def compile_ahead(self, prompt_lengths: Sequence[int]) -> None:
        """Do nothing: servers compile by themselves."""

    def generate(
        self,
        requests: Sequence[Request],
        sampling: Sampling,
        *,
        seed: int,
        progress: Callable[[int, int], None] | None = None,
        on_completion: Callable[[Completion], None] | None = None,
    ) -> list[Completion]:
        """Return one completion per request, in the order of the requests; requests with one prompt go to one server.

        Raises:
          EndpointError: A server did not answer in time, or its answer is invalid.
        """
        self.send_weights()
        numbers = {prompt: number for number, prompt in enumerate(dict.fromkeys(r.prompt_tokens for r in requests))}
        urls = self.server.urls
        pool = ThreadPoolExecutor(min(self.server.concurrency, max(len(requests), 1)))
        try:
            futures = [
                pool.submit(self._complete, urls[numbers[request.prompt_tokens] % len(urls)], request, sampling, seed)
                for request in requests
            ]
            for done, one in enumerate(as_completed(futures), start=1):
                completion = one.result()
                if on_completion is not None:
                    on_completion(completion)
                if progress is not None:
                    progress(done, len(requests))
        finally:
            pool.shutdown(cancel_futures=True)
        self.check_weights()
        return [one.result() for one in futures]

    def complete(self, request: Request, sampling: Sampling, *, seed: int) -> Completion:
        """Return the completion of one request; requests with the same `request_id` go to one server.

        Raises:
          EndpointError: The server did not answer in time, or its answer is invalid.
        """
        return self._complete(self.server.urls[request.request_id % len(self.server.urls)], request, sampling, seed)

    def _complete(self, url: str, request: Request, sampling: Sampling, seed: int) -> Completion:
        assert self.image_url is not None or not request.images, "a model that reads only text has no images"
        asked = ServerRequest(
            _with_one_placeholder_each(request),
            [self.image_url(image) for image in request.images] if self.image_url is not None else [],
            sampling,
            min(request.max_tokens or self.max_response_tokens, self.max_response_tokens),
            self.stop_tokens if request.stop_tokens is None else request.stop_tokens,
            self.stop_texts if request.stop_texts is None else request.stop_texts,
            _seed(seed, request.request_id),
            self.records_routing,
        )
        path, body = self.protocol.generate(asked)
        reply = self._post(url + path, body, limit_s=self.server.request_s)
        try:
            answer = self.protocol.answer(reply)
            self._check(answer, asked.max_tokens)
            self._check_prompt(answer, request)
            recorded = {ROUTING: (0, self._experts(answer, request))} if self.records_routing else {}
        except (LookupError, TypeError, ValueError) as error:
            raise Unreadable(
                f"{url}{path} returned no valid {self.server.api} response to request {request.request_id}: "
                f"{type(error).__name__}: {error}"
            ) from error
        sampled = answer.tokens, answer.logps, answer.truncated, self._version
        return Completion(request.request_id, *sampled, recorded=recorded)

    def _check(self, answer: ServerResponse, most: int) -> None:
        """Raise `ValueError` if a response is impossible for the request, the vocabulary or the weights."""
        tokens, logps = answer.tokens, answer.logps
        if len(tokens) != len(logps) or not 0 < len(tokens) <= most:
            raise ValueError(
                f"got {len(tokens)} tokens and {len(logps)} log-probabilities, expected 1 to {most} of each"
            )
        if wrong := [token for token in tokens if not 0 <= token < self.model.vocab_size]:
            raise ValueError(f"got token ids {wrong[:3]}, expected ids below {self.model.vocab_size}")
        if impossible := [logp for logp in logps if not (math.isfinite(logp) and logp <= 1e-3)]:
            raise ValueError(f"got log-probabilities {impossible[:3]}, expected finite numbers of at most 0")
        if answer.truncated and len(tokens) < most:
            raise ValueError(
                f"truncated after {len(tokens)} of {most} tokens; start the server with a context (vLLM: "
                "--max-model-len, SGLang: --context-length) for the longest prompt plus response"
            )
        if answer.weights not in (None, sent := self.files.newest):
            raise ValueError(f"sampled with weights {answer.weights!r}, expected {sent!r}; {_OTHER_WEIGHTS}")

    def _check_prompt(self, answer: ServerResponse, request: Request) -> None:
        """Raise `ValueError` if a server saw other tokens than the trainer in a prompt with images."""
        if not request.images or answer.prompt_tokens == request.prompt_tokens:
            return
        seen = "no prompt" if answer.prompt_tokens is None else f"a prompt of {len(answer.prompt_tokens)} tokens"
        raise ValueError(
            f"the server reports {seen}, expected the {len(request.prompt_tokens)} tokens that the trainer has for the "
            f"text and its {len(request.images)} images; start it with the checkpoint of the run, whose image "
            f"processor decides how many tokens an image has, and with {self.protocol.images_flag}"
        )

    def _experts(self, answer: ServerResponse, request: Request) -> np.ndarray:
        """Return the experts of all tokens but the last, `[T - 1, L, k]`, without the layers that have none."""
        assert self.model.experts is not None, "checked when the engine was built"
        if answer.experts is None:
            needed = self.protocol.routing_flag
            raise ValueError(f"got no experts, which rollout.replay_routing needs; start the server with {needed}")
        tokens, (routed, each) = len(request.prompt_tokens) + len(answer.tokens) - 1, self.model.routed_choices
        if answer.experts.size != tokens * self.model.num_layers * each:
            raise ValueError(
                f"got {answer.experts.size} experts, expected those of {tokens} tokens in {self.model.num_layers} "
                f"layers with {each} choices"
            )
        choice_TLk = answer.experts.reshape(tokens, self.model.num_layers, each)[:, -routed:].astype(np.int16)
        ordered_TLk, count = np.sort(choice_TLk, axis=-1), self.model.experts.count
        if ordered_TLk.min() < 0 or ordered_TLk.max() >= count or (np.diff(ordered_TLk) == 0).any():
            raise ValueError(f"got experts that a token cannot have, expected {each} different ids below {count}")
        return choice_TLk

    def _post(self, url: str, body: dict[str, Any], *, limit_s: float, final: Sequence[int] = ()) -> Any:
        key = self.server.api_key_env
        return post_json(url, body, api_key_env=key, attempt_s=limit_s, total_s=limit_s, final=final)


def _with_one_placeholder_each(request: Request) -> tuple[int, ...]:
    """Return the tokens of a prompt with one placeholder for each image; servers repeat it for the image's features."""
    tokens: list[int] = []
    end = 0
    for image in request.images:
        tokens += request.prompt_tokens[end : image.start + 1]
        end = image.start + image.tokens
    return (*tokens, *request.prompt_tokens[end:])


def _seed(seed: int, request_id: int) -> int:
    """Return the seed of one response, in [0, 2**31)."""
    return int(np.random.SeedSequence([seed, request_id]).generate_state(1)[0]) >> 1
