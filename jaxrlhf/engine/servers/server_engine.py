"""Rollout engine that calls inference servers with token ids, and gets token ids and log-probabilities back.

Weights are sent as checkpoint files. The seed of a response is made from the step's seed and its request_id, so a
server whose sampling depends on the seed alone repeats its responses. No server promises that to the last bit.
"""

import math
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from jaxrlhf.config import RolloutServer, Sampling
from jaxrlhf.engine.rollout_engine import PolicyWeights
from jaxrlhf.engine.sequence import Completion, Request
from jaxrlhf.engine.servers.protocols import PROTOCOLS, ResponseEnds, ServerResponse
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
      folder: Folder for this engine's checkpoints, which the servers read. Older checkpoints (`version_*`) are deleted
        once all servers have loaded a newer one.
      save: Function that writes weights to a folder as a checkpoint.
      logps: Function that returns the log-probabilities that weights give to the tokens of a sequence after its first;
        None compares no log-probabilities.
      vocab_size: Size of the vocabulary; replies with larger ids are refused.
    """

    server: RolloutServer
    folder: Path
    save: Callable[[PolicyWeights, Path], None]
    logps: Callable[[PolicyWeights, Sequence[int]], np.ndarray] | None
    vocab_size: int
    max_response_tokens: int
    stop_tokens: Sequence[int]
    stop_texts: Sequence[str]
    _waiting: PolicyWeights | None = None
    _version: int = -1
    _loaded: str = ""

    def update_weights(self, weights: PolicyWeights) -> None:
        """Set the weights for the next requests; they are sent with the next `generate`."""
        self._waiting = weights

    def send_weights(self) -> None:
        """Write a checkpoint of the newest weights and have every server load it, unless the servers have them.

        Raises:
          EndpointError: A server did not load it, or computes other log-probabilities.
        """
        if (weights := self._waiting) is None:
            return
        folder = (self.folder / f"version_{weights.version}").absolute()
        shutil.rmtree(folder, ignore_errors=True)  # left over from a killed run
        self.save(weights, folder)
        with ThreadPoolExecutor(len(self.server.urls)) as pool:
            list(pool.map(partial(self._reload, folder=folder), self.server.urls))
        for older in self.folder.glob("version_*"):
            if older.name != folder.name:
                shutil.rmtree(older)
        self._version, self._loaded = weights.version, str(folder)
        if self.logps is not None:
            for url in self.server.urls:
                self._compare(url, partial(self.logps, weights))
        self._waiting = None

    def _reload(self, url: str, *, folder: Path) -> None:
        protocol = PROTOCOLS[self.server.api]
        for path, body in protocol.reload(folder):
            # vLLM answers 500 if it cannot read the folder, and exits then.
            reply = self._post(url + path, body, limit_s=self.server.reload_s, final=(500,))
            try:
                protocol.check_reloaded(reply)
            except (AttributeError, LookupError, TypeError, ValueError) as error:
                raise Unreadable(f"{url}{path} did not load {folder}: {error}") from error

    def _compare(self, url: str, logps: Callable[[Sequence[int]], np.ndarray]) -> None:
        """Raise `Unreadable` if a server's log-probabilities of tokens that it samples are far from the trainer's."""
        prompt, sampled = PROBE_TOKENS
        tokens = tuple(int(token) for token in np.linspace(1, self.vocab_size - 1, prompt))
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
        if (path := PROTOCOLS[self.server.api].weights_path) is None:
            return
        for url in self.server.urls:
            reply = get_json(url + path, api_key_env=self.server.api_key_env, total_s=self.server.request_s)
            if not isinstance(reply, dict) or reply.get("weight_version") != self._loaded:
                raise Unreadable(f"{url}{path} returned {reply}, expected weights {self._loaded!r}; {_OTHER_WEIGHTS}")

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
        ends = ResponseEnds(
            min(request.max_tokens or self.max_response_tokens, self.max_response_tokens),
            self.stop_tokens if request.stop_tokens is None else request.stop_tokens,
            self.stop_texts if request.stop_texts is None else request.stop_texts,
        )
        protocol = PROTOCOLS[self.server.api]
        path, body = protocol.generate(request.prompt_tokens, sampling, ends, seed=_seed(seed, request.request_id))
        reply = self._post(url + path, body, limit_s=self.server.request_s)
        try:
            answer = protocol.answer(reply)
            self._check(answer, ends)
        except (LookupError, TypeError, ValueError) as error:
            raise Unreadable(
                f"{url}{path} returned no valid {self.server.api} response to request {request.request_id}: "
                f"{type(error).__name__}: {error}"
            ) from error
        return Completion(request.request_id, answer.tokens, answer.logps, answer.truncated, self._version)

    def _check(self, answer: ServerResponse, ends: ResponseEnds) -> None:
        """Raise `ValueError` if a response is impossible for the request, the vocabulary or the weights."""
        tokens, logps = answer.tokens, answer.logps
        if len(tokens) != len(logps) or not 0 < len(tokens) <= ends.max_tokens:
            raise ValueError(
                f"got {len(tokens)} tokens and {len(logps)} log-probabilities, expected 1 to {ends.max_tokens} of each"
            )
        if wrong := [token for token in tokens if not 0 <= token < self.vocab_size]:
            raise ValueError(f"got token ids {wrong[:3]}, expected ids below {self.vocab_size}")
        if impossible := [logp for logp in logps if not (math.isfinite(logp) and logp <= 1e-3)]:
            raise ValueError(f"got log-probabilities {impossible[:3]}, expected finite numbers of at most 0")
        if answer.truncated and len(tokens) < ends.max_tokens:
            raise ValueError(
                f"truncated after {len(tokens)} of {ends.max_tokens} tokens; start the server with a context (vLLM: "
                "--max-model-len, SGLang: --context-length) for the longest prompt plus response"
            )
        if answer.weights not in (None, self._loaded):
            raise ValueError(f"sampled with weights {answer.weights!r}, expected {self._loaded!r}; {_OTHER_WEIGHTS}")

    def _post(self, url: str, body: dict[str, Any], *, limit_s: float, final: Sequence[int] = ()) -> Any:
        key = self.server.api_key_env
        return post_json(url, body, api_key_env=key, attempt_s=limit_s, total_s=limit_s, final=final)


def _seed(seed: int, request_id: int) -> int:
    """Return the seed of one response, in [0, 2**31)."""
    return int(np.random.SeedSequence([seed, request_id]).generate_state(1)[0]) >> 1
