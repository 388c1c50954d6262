"""Bytes of weights and caches that one device holds."""

import math
from typing import NamedTuple

import numpy as np

from jaxrlhf.config import Layout, Lora
from jaxrlhf.engine.buckets import ring_entries
from jaxrlhf.models.attention.rings import windowed_share
from jaxrlhf.models.config import Head, ModelConfig
from jaxrlhf.models.lora.quantized import TILE, Format
from jaxrlhf.models.memory import adapters_held, replicated_weights, weights_held
from jaxrlhf.planner.workload import Software, Workload


def routed_weights(model: ModelConfig) -> int:
    """Weights of all experts of all layers; 0 of a dense model."""
    if model.experts is None:
        return 0
    each = 3 * model.hidden_size * model.experts.intermediate_size
    return model.routed_choices[0] * model.experts.count * each


def bytes_per_weight(model: ModelConfig, lora: Lora | None, *, itemsize: int, quantize: Format | None = None) -> float:
    """Bytes of a weight that is not trained, on average: layers may be quantised.

    Args:
      lora: Settings of the adapters beside them; None if there are none.
      quantize: Format of layers that generate; None leaves them as they are.
      itemsize: Bytes of weights in the compute dtype, and of scales.
    """
    kind = quantize or (None if lora is None else lora.quantize)
    if kind is None:
        return itemsize
    few = {"int8": 1.0, "fp8": 1.0, "nf4": 0.5}[kind] + itemsize / TILE
    return itemsize + (few - itemsize) * model.num_layers * model.layer_parameters() / model.num_parameters("lm")


def weights_learnt(model: ModelConfig, head: Head, lora: Lora | None, layout: Layout) -> float:
    """Weights of a trained model that have a gradient and moments on one device."""
    return weights_held(model, head, layout) if lora is None else adapters_held(model, lora, layout)


def weights_generating(model: ModelConfig, layout: Layout) -> float:
    """Weights of a policy that one device holds while it generates."""
    split = layout.generation_stage * layout.generation_tensor
    routed, replicated = routed_weights(model), replicated_weights(model, layout.generation_tensor)
    return (model.num_parameters("lm") - routed + routed / layout.expert + replicated) / split


def weights_apart(model: ModelConfig, layout: Layout) -> float:
    """Weights of the layers among those that generate, each of which decoding reads by itself."""
    return weights_generating(model, layout) * model.num_layers * model.layer_parameters() / model.num_parameters("lm")


def weights_taken_apart(model: ModelConfig, layout: Layout) -> float:
    """Weights that are in a stack and apart at most, while a stack that nobody else reads becomes layers.

    Attention is taken apart as a whole, the MLP one of its three matrices after another.
    """
    plain_layers = model.num_layers if model.experts is None else model.dense_layers
    inner = model.mean_intermediate_size
    matrix = routed_weights(model) / (3 * layout.expert) + plain_layers * model.hidden_size * inner
    attention = model.num_layers * model.attention_parameters + replicated_weights(model, layout.generation_tensor)
    return max(attention, matrix) / (layout.generation_stage * layout.generation_tensor)


def cache_bytes_per_token(model: ModelConfig, layout: Layout, *, itemsize: int, lanes: int = 1) -> float:
    """Keys and values of one token that one device holds; each head's are filled up to a multiple of `lanes`.

    Of positions that devices share a device has its part.
    """
    head = model.mean_head_dim if model.latent is None else model.latent.rank + model.latent.rope_dim
    filled = -(-head // lanes) * lanes / head if lanes > 1 else 1
    kept = model.num_layers * model.cache_width * filled * itemsize
    kept /= layout.generation_stage * layout.generation_context
    # A latent serves all heads, so that every tensor shard keeps it.
    return kept if model.latent is not None else kept / math.gcd(layout.generation_tensor, model.num_kv_heads)


def cache_bytes(model: ModelConfig, layout: Layout, *, tokens: float, itemsize: int, lanes: int = 1) -> float:
    """Keys and values, and states of layers that have those instead, that one device holds of one sequence."""
    state = model.state_bytes / (layout.generation_stage * layout.generation_tensor)
    return tokens * cache_bytes_per_token(model, layout, itemsize=itemsize, lanes=lanes) + state


def in_pages(layout: Layout, software: Software) -> bool:
    """Return whether the cache lies in pages: layers that stages divide, and shared positions, lie in slots."""
    return software.pages and layout.generation_stage == layout.generation_context == 1


def kept_tokens(model: ModelConfig, layout: Layout, tokens: float, work: Workload, software: Software) -> float:
    """Tokens of so many that a cache keeps, on average over layers: in slots, those with a window keep few."""
    if in_pages(layout, software):
        return tokens
    dispatch = software.decode_tokens_per_dispatch or 0
    entries = ring_entries(model, longest=work.longest_tokens, tokens_per_dispatch=dispatch)
    if entries is None:
        return tokens
    share = windowed_share(model, stages=layout.generation_stage)
    # Every device that shares the other positions has rings of its own.
    return share * entries * layout.generation_context + (1 - share) * tokens


class CachePerSequence(NamedTuple):
    """Bytes of a device's cache at the longest sequence.

    Attributes:
      prompt: Bytes of a prompt, which its responses share; 0 where each has its own.
      response: Bytes of each response beside it.
    """

    prompt: float
    response: float

    def of(self, responses: int, *, prompts: int) -> float:
        """Bytes of so many responses, to as many prompts as there may be among them."""
        return min(responses, prompts) * self.prompt + responses * self.response

    def fitting(self, room: np.ndarray, *, prompts: np.ndarray) -> np.ndarray:
        """Most responses whose cache takes no more than `room` bytes."""
        apart = room // (self.prompt + self.response)
        return np.where(apart < prompts, apart, (room - prompts * self.prompt) // self.response)


def cache_per_sequence(model: ModelConfig, layout: Layout, work: Workload, software: Software) -> CachePerSequence:
    """Cache of a replica's sequences."""
    sizes = {"itemsize": software.compute_bytes, "lanes": software.cache_lanes}
    if not in_pages(layout, software):
        kept = kept_tokens(model, layout, work.longest_tokens, work, software)
        return CachePerSequence(0.0, cache_bytes(model, layout, tokens=kept, **sizes))
    shared = work.longest_prompt_tokens
    return CachePerSequence(
        shared * cache_bytes_per_token(model, layout, **sizes),
        cache_bytes(model, layout, tokens=work.longest_tokens - shared, **sizes),
    )
