"""Validation of an engine's sizes against model and mesh, and of its requests."""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
from jax.sharding import Mesh

from jaxrlhf.batch import Params
from jaxrlhf.config import Refusal, Sampling
from jaxrlhf.engine.sequence import Request, SequenceState
from jaxrlhf.models import AnyModel, Execution
from jaxrlhf.models.config import ModelConfig, Vision
from jaxrlhf.models.vision.rows import check_placeholders

STOP_TOKENS = 8
"""Minimum number of stop token ids that any request may name."""


def check_sizes(config: AnyModel, *, capacity: int, stop_tokens: tuple[int, ...], **sizes: int) -> None:
    """Raise `Refusal` if sizes do not fit the model.

    Args:
      capacity: Number of tokens that a slot's cache holds.
      sizes: Other settings that are counts, each of which must be 1 or more.
    """
    for name, size in sizes.items():
        if size < 1:
            raise Refusal(f"{name}={size}; expected 1 or more")
    if capacity > config.max_positions:
        raise Refusal(
            f"max_prompt_tokens + max_response_tokens = {capacity} exceeds the model's {config.max_positions} "
            "positions; lower one of them"
        )
    outside = [token for token in stop_tokens if not 0 <= token < config.vocab_size]
    if outside:
        raise Refusal(f"stop_tokens {outside} are not in the vocabulary; expected ids below {config.vocab_size}")


def check_split(config: AnyModel, mesh: Mesh, execution: Execution, *, kv_head_axis: str | None) -> None:
    """Raise `Refusal` if the cache does not split evenly over the mesh."""
    heads, head_ways = config.num_kv_heads, mesh.shape[kv_head_axis] if kv_head_axis else 1
    heads *= execution.kv_copies(heads)
    linear_heads = 0 if config.linear is None else config.linear.key_heads
    for axis, what, count, ways, size in (
        (kv_head_axis, "key-value heads", heads, head_ways, "tensor"),
        (kv_head_axis, "key heads of linear attention", linear_heads, head_ways, "tensor"),
        ("stage", "layers", config.num_layers, execution.stages, "stage"),
    ):
        if count % ways:
            raise Refusal(
                f"{count} {what} do not split {ways} ways over mesh axis {axis!r}; set generation_{size} to a "
                f"divisor of {count}"
            )


def check_shared(config: AnyModel, execution: Execution, *, shortest_chunk: int) -> None:
    """Raise `Refusal` if devices cannot share the positions of a slot (decode context parallelism).

    Args:
      shortest_chunk: Number of tokens of the shortest prompt chunk, which is split evenly over the devices.
    """
    ways = execution.cache_ways
    if ways == 1:
        return
    if not isinstance(config, ModelConfig):
        raise Refusal(
            f"generation_context={ways} requires the decoder's own cache, and a user-defined model has another; set "
            "generation_context=1"
        )
    if execution.stages > 1:
        raise Refusal(
            f"generation_context={ways} cannot be combined with generation_stage={execution.stages}; set "
            "generation_stage=1 and use generation_tensor instead"
        )
    if shortest_chunk % ways:
        sizes = [count for count in range(2, shortest_chunk + 1) if shortest_chunk % count == 0]
        raise Refusal(
            f"generation_context={ways} does not divide prompt chunks of {shortest_chunk} tokens; set "
            f"generation_context to one of {sizes}"
        )


def check_laid_out(params: Params, mesh: Mesh) -> None:
    """Raise `ValueError` if a weight is not on exactly the devices of the mesh."""
    devices = set(mesh.devices.flat)
    for path, leaf in jax.tree.leaves_with_path(params):
        if not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct) or leaf.sharding.device_set != devices:
            raise ValueError(
                f"{jax.tree_util.keystr(path)} is not on the devices of the engine's mesh; reshard the weights first"
            )


def check_routing(config: AnyModel, *, records_routing: bool) -> None:
    """Raise `Refusal` if experts are to be recorded and the model has none."""
    if records_routing and config.experts is None:
        raise Refusal(
            "replay_routing=True records the chosen experts, but this model has no experts; set replay_routing=False"
        )


@dataclass(frozen=True)
class RequestLimits:
    """Limits of an engine's requests, and the default end conditions of responses.

    Attributes:
      capacity: Maximum number of tokens of prompt and response together.
      vocab: Size of the vocabulary.
      most_tokens, most_stops: Maximum number of response tokens, and of stop token ids.
      stop_tokens, stop_texts: Defaults for requests that name none.
      decodes: True if the engine has a detokenizer, so that it can find stop texts.
      vision: Vision tower of the model; None refuses images.
    """

    capacity: int
    vocab: int
    most_tokens: int
    most_stops: int
    stop_tokens: tuple[int, ...]
    stop_texts: tuple[str, ...]
    decodes: bool
    vision: Vision | None

    def new_sequence(self, request: Request, sampling: Sampling, *, seed: int) -> SequenceState:
        """Validate a request and return its state, not queued yet.

        Args:
          seed: Integer in [0, 2**32). A response depends on the seed, its request_id and its prompt, on nothing else.

        Raises:
          Refusal: The request cannot be answered, or the seed is out of range.
        """
        limit = self.most_tokens if request.max_tokens is None else request.max_tokens
        stops = self.stop_tokens if request.stop_tokens is None else tuple(request.stop_tokens)
        texts = self.stop_texts if request.stop_texts is None else tuple(request.stop_texts)
        self._check(request, limit, seed=seed)
        check_stop_texts(texts, decodes=self.decodes)
        for name, count in (("top_k", sampling.top_k), ("min_tokens", sampling.min_tokens)):
            if not 0 <= count < 2**31:
                raise Refusal(f"{name}={count} does not fit an integer of 32 bits; expected 0 to 2**31 - 1")
        return SequenceState(request, sampling, seed, limit, stops, texts)

    def _check(self, request: Request, limit: int, *, seed: int) -> None:
        """Raise `Refusal` if a request cannot be answered with at most `limit` tokens."""
        prompt = request.prompt_tokens
        own = bool(request.has_replies or request.sampled)
        check_placeholders(prompt, request.images, self.vision, place=f"request {request.request_id}", sampled=own)
        if request.sampled and not 0 < request.sampled < min(limit, len(prompt)):
            raise Refusal(
                f"sampled={request.sampled} of request {request.request_id}, with a prompt of {len(prompt)} tokens and "
                f"at most {limit} response tokens; expected at least 0, and less than both"
            )
        limit -= request.sampled
        longest = self.capacity - limit
        if not 0 < len(prompt) <= longest:
            raise Refusal(
                f"request {request.request_id} has a prompt of {len(prompt)} tokens and a response of up to {limit}; "
                f"expected a prompt of 1 to {longest} tokens: shorten the prompt, lower max_tokens, or build the "
                "engine for longer prompts"
            )
        self._check_ids(prompt)
        for name, value in (("seed", seed), ("request_id", request.request_id)):
            if not 0 <= value < 2**32:
                raise Refusal(f"{name}={value} does not fit the random key; expected 0 to 2**32 - 1")
        if request.max_tokens is not None and not 0 < request.max_tokens <= self.most_tokens:
            raise Refusal(
                f"max_tokens={request.max_tokens} of request {request.request_id}; expected 1 to the engine's "
                f"max_response_tokens={self.most_tokens}"
            )
        stops = request.stop_tokens or ()
        if len(stops) > self.most_stops or any(not 0 <= stop < self.vocab for stop in stops):
            raise Refusal(
                f"stop_tokens={stops} of request {request.request_id}; expected at most {self.most_stops} ids, all "
                f"below the vocabulary size {self.vocab}"
            )

    def check_scored(self, tokens: Sequence[int]) -> None:
        """Raise `Refusal` if a sequence cannot be scored."""
        if not 0 < len(tokens) <= self.capacity:
            raise Refusal(
                f"a sequence to score has {len(tokens)} tokens; expected 1 to {self.capacity}: shorten the sequence, "
                "or build the engine for longer sequences"
            )
        self._check_ids(tokens)

    def _check_ids(self, tokens: Sequence[int]) -> None:
        low, high = min(tokens), max(tokens)
        if not (low >= 0 and high < self.vocab):
            raise Refusal(
                f"prompt ids range from {low} to {high}; expected ids from 0 to {self.vocab - 1}, the model's "
                "vocabulary"
            )


def check_stop_texts(texts: Sequence[str], *, decodes: bool) -> None:
    """Raise `Refusal` if stop texts cannot be found: no detokenizer, an empty text, or half of a surrogate pair."""
    if texts and not decodes:
        raise Refusal(f"stop_texts={texts} require a detokenizer; build the engine with `decode`, or use stop_tokens")
    if "" in texts:
        raise Refusal(f"stop_texts={texts} contain an empty text, which matches every text; remove the empty text")
    for text in texts:
        if text != text.encode(errors="replace").decode():
            raise Refusal(f"stop text {text!r} contains half of a surrogate pair; expected whole characters")


def check_unique(requests: Sequence[Request]) -> None:
    """Raise `ValueError` if two requests of a batch have the same request_id and so would be sampled alike."""
    if len({request.request_id for request in requests}) < len(requests):
        raise ValueError("two requests have the same request_id and would get the same samples; make the ids unique")
