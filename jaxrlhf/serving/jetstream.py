"""Served model behind JetStream's engine interface, for its orchestrator and gRPC server; needs `jaxrlhf[jetstream]`.

JetStream (google-jetstream 0.2.2) is archived upstream. Its interface has no log-probabilities, no tokens that ended a
response, and no sampling settings by request.
"""

import logging
from collections.abc import Sequence
from concurrent.futures import Future
from itertools import count
from queue import SimpleQueue
from typing import Any

import jax
import numpy as np
from jetstream.core import config_lib, orchestrator, server_lib
from jetstream.engine import engine_api, tokenizer_api, tokenizer_pb2
from jetstream.engine.token_utils import pad_tokens

from jaxrlhf.config import Refusal, Sampling
from jaxrlhf.engine import Completion, Request
from jaxrlhf.serving.errors import ApiError
from jaxrlhf.serving.served import ServedModel

logger = logging.getLogger(__name__)

logging.getLogger().removeHandler(orchestrator.handler)  # importing it logs everything to standard output
logging.getLogger().setLevel(logging.WARNING)
if not hasattr(jax, "tree_map"):
    vars(jax)["tree_map"] = jax.tree.map  # JetStream uses its name of 2024

BEGINNING = -1
"""BOS token that JetStream puts before a prompt; removed again, because prompts have the tokenizer's BOS token."""

SHORTEST_PREFILL = 16


class Response:
    """Response in progress: result of JetStream's prefill, and later the content of a slot."""

    def __init__(self) -> None:
        self._tokens: SimpleQueue[int | None] = SimpleQueue()
        self._future: Future[Completion] = Future()
        self._count, self._ended = 0, False

    def follow(self, future: Future[Completion]) -> None:
        self._future = future
        future.add_done_callback(lambda _: self._tokens.put(None))

    def take(self, tokens: Sequence[int], logps: Sequence[float]) -> None:
        """Receive sampled tokens, as the service's listener."""
        for token in tokens:
            self._tokens.put(token)

    def next(self) -> tuple[int, int, int]:
        """Wait for the next token; return the token, 1 (0 after the end), and the number of tokens so far."""
        token = None if self._ended else self._tokens.get()
        if token is None:
            if not self._ended and not self._future.cancelled():
                self._future.result()  # raises an error of the engine, which would otherwise look like the end
            self._ended = True
            return 0, 0, self._count
        self._count += 1
        return token, 1, self._count

    def cancel(self) -> None:
        self._future.cancel()


class JetStreamEngine(engine_api.Engine):
    """JetStream engine whose slots are responses of a service.

    Args:
      sampling: Sampling settings of all requests.
      seed: Integer in [0, 2**32). Seed, id of the request and prompt determine a response.
    """

    def __init__(self, model: ServedModel, sampling: Sampling, *, seed: int) -> None:
        self._model, self._sampling, self._seed, self._ids = model, sampling, seed, count()

    def prefill(
        self,
        *,
        params: None,
        existing_prefix: Response | None = None,
        padded_tokens: Any,
        true_length: int,
    ) -> Response:
        """Start a response; its prompt is the first `true_length` tokens."""
        tokens = np.asarray(padded_tokens)[:true_length].tolist()
        prompt = tuple(tokens[1:] if tokens[:1] == [BEGINNING] else tokens)
        response, model = Response(), self._model
        try:
            limit = model.response_limit(prompt, None)
            request = Request(next(self._ids), prompt, max_tokens=limit, stop_tokens=model.stop_tokens)
            future = model.service.submit(request, self._sampling, seed=self._seed, on_tokens=response.take)
        except (ApiError, Refusal) as error:  # an error would end JetStream's process, so answer with no tokens
            logger.warning("a request cannot be answered: %s", error)
            future = Future()
            future.cancel()
        response.follow(future)
        return response

    def insert(self, prefix: Response, decode_state: list[Response | None], slot: int) -> list[Response | None]:
        """Fill a slot; cancel the slot's previous response if it is unfinished."""
        if (previous := decode_state[slot]) is not None:
            previous.cancel()
        decode_state[slot] = prefix
        return decode_state

    def generate(
        self, params: None, decode_state: list[Response | None]
    ) -> tuple[list[Response | None], engine_api.ResultTokens]:
        """Return the next token of every slot."""
        tokens_S3 = np.array([(0, 0, 0) if one is None else one.next() for one in decode_state], np.int32)
        return decode_state, engine_api.ResultTokens(tokens_S3, (0, 1), (1, 2), (2, 3), 1)

    def init_decode_state(self, *args: Any, **kwargs: Any) -> list[Response | None]:
        return [None] * self.max_concurrent_decodes

    def load_params(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing; the service has the parameters."""

    def get_prefix_destination_sharding(self) -> None:
        """Return None; a response is no array."""

    def get_tokenizer(self) -> tokenizer_pb2.TokenizerParameters:
        return tokenizer_pb2.TokenizerParameters()

    def build_tokenizer(self, metadata: tokenizer_pb2.TokenizerParameters) -> "JetStreamTokenizer":
        return JetStreamTokenizer(self._model)

    @property
    def max_concurrent_decodes(self) -> int:
        return self._model.service.engine.slots

    @property
    def samples_per_slot(self) -> int:
        return 1

    @property
    def max_prefill_length(self) -> int:
        """Longest prompt length that JetStream pads to (powers of two) and the engine's context has room for."""
        return max(SHORTEST_PREFILL, 1 << ((self._model.service.engine.context_tokens - 1).bit_length() - 1))

    @property
    def mesh(self) -> jax.sharding.Mesh:
        return self._model.service.engine.mesh

    @property
    def colocated_cpus(self) -> None:
        return None


class JetStreamTokenizer(tokenizer_api.Tokenizer):
    """Tokenizer of a served model."""

    def __init__(self, model: ServedModel) -> None:
        self._model = model

    def encode(
        self, s: str, *, is_bos: bool = True, max_prefill_length: int | None = None, jax_padding: bool = False, **_: Any
    ) -> tuple[Any, int]:
        tokens = np.array(self._model.tokens_of(s), np.int32)
        return pad_tokens(
            tokens, self.bos_id, self.pad_id, is_bos, max_prefill_length=max_prefill_length, jax_padding=jax_padding
        )

    def decode(self, token_ids: list[int], **_: Any) -> str:
        return str(self._model.tokenizer.decode(token_ids))

    @property
    def stop_tokens(self) -> set[int]:
        return set(self._model.stop_tokens)

    @property
    def eos_id(self) -> int:
        return int(self._model.tokenizer.eos_token_id)

    @property
    def pad_id(self) -> int:
        return 0

    @property
    def bos_id(self) -> int:
        return BEGINNING


def serve(model: ServedModel, sampling: Sampling, *, port: int, seed: int = 0) -> server_lib.JetStreamServer:
    """Start JetStream's gRPC server, on all interfaces and without authentication; `stop` ends it."""
    engine = JetStreamEngine(model, sampling, seed=seed)
    devices = model.service.engine.mesh.devices.flatten().tolist()
    slices = config_lib.ServerConfig(
        interleaved_slices=(f"devices={len(devices)}",), interleaved_engine_create_fns=(lambda _: engine,)
    )
    return server_lib.run(port, slices, devices, jax_padding=False)
