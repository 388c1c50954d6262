"""Bytes of weights and caches that one device holds."""

import math
from typing import NamedTuple

import numpy as np

from jaxrlhf.config import Layout, Lora
from jaxrlhf.engine.buckets import ring_entries
from jaxrlhf.models.attention.rings import windowed_share
from jaxrlhf.models.config import Head, ModelConfig
from jaxrlhf.models.counts import weight_counts
from jaxrlhf.models.lora.quantized import TILE, Format
from jaxrlhf.models.memory import adapters_held, weights_held
from jaxrlhf.planner.workload import Software, Workload


def bytes_per_weight(model: ModelConfig, lora: Lora | None, *, itemsize: int, quantize: Format | None = None) -> float:
    """Return the mean bytes of a weight that is not trained; layers may be quantized.

    Args:
      lora: Settings of adapters next to the weights; None if there are no adapters.
      quantize: Format of layers for generation; None does not quantize layers for generation.
      itemsize: Bytes of a weight in the compute dtype, and of a scale.
    """
    kind = quantize or (None if lora is None else lora.quantize)
    if kind is None:
        return itemsize
    quantized = {"int8": 1.0, "fp8": 1.0, "nf4": 0.5}[kind] + itemsize / TILE
    weights = weight_counts(model)
    return itemsize + (quantized - itemsize) * weights.layers / weights.total


def weights_trained(model: ModelConfig, head: Head, lora: Lora | None, layout: Layout) -> float:
    """Return the number of a trained model's weights that have a gradient and moments on one device."""
    return weights_held(model, head, layout) if lora is None else adapters_held(model, lora, layout)


def weights_generating(model: ModelConfig, layout: Layout) -> float:
    """Return the number of a policy's weights that one device holds in generation."""
    split = layout.generation_stage * layout.generation_tensor
    weights = weight_counts(model)
    whole = weights.total + weights.replicated(layout.generation_tensor)
    return (whole - weights.experts + weights.experts / layout.expert) / split


def weights_unstacked(model: ModelConfig, layout: Layout) -> float:
    """Return the number of weights of the unstacked layers, which decoding reads, on one device."""
    weights = weight_counts(model)
    return weights_generating(model, layout) * weights.layers / weights.total


def weights_unstacking(model: ModelConfig, layout: Layout) -> float:
    """Return the largest number of weights that exist twice while a stack is unstacked and deleted in parts.

    Attention is one part; each of the three matrices of the MLP is a part.
    """
    weights = weight_counts(model)
    matrix = weights.experts / (3 * layout.expert) + weights.down
    attention = weights.attention + weights.replicated(layout.generation_tensor)
    return max(attention, matrix) / (layout.generation_stage * layout.generation_tensor)


def cache_bytes_per_token(model: ModelConfig, layout: Layout, *, itemsize: int, lanes: int = 1) -> float:
    """Return the cache bytes of one token on one device.

    If devices share positions, a device has its part of the positions, and the mean over positions is returned. A layer
    that predicts the second next token is counted, though pages do not have it.

    Args:
      lanes: Multiple that the cached numbers of each head are padded to.
    """
    head = model.mean_head_dim if model.latent is None else model.latent.rank + model.latent.rope_dim
    filled = -(-head // lanes) * lanes / head if lanes > 1 else 1
    drafting = 0 if model.mtp is None else model.num_layers / model.attention_layers  # a layer with keys and values
    kept = (model.num_layers + drafting) * model.cache_width * filled * itemsize
    kept /= layout.generation_stage * layout.generation_context
    # A latent serves all heads, so every tensor shard keeps the latent.
    return kept if model.latent is not None else kept / math.gcd(layout.generation_tensor, model.num_kv_heads)


def cache_bytes(model: ModelConfig, layout: Layout, *, tokens: float, itemsize: int, lanes: int = 1) -> float:
    """Return the cache bytes of one sequence on one device, including states of layers without keys and values."""
    state = model.state_bytes / (layout.generation_stage * layout.generation_tensor)
    return tokens * cache_bytes_per_token(model, layout, itemsize=itemsize, lanes=lanes) + state


def in_pages(layout: Layout, software: Software) -> bool:
    """Return whether the cache is in pages; with several stages or shared positions the cache is in slots."""
    return software.pages and layout.generation_stage == layout.generation_context == 1


def kept_tokens(model: ModelConfig, layout: Layout, tokens: float, work: Workload, software: Software) -> float:
    """Return how many of `tokens` tokens a cache keeps, on average over layers: in slots, windowed layers keep few."""
    if in_pages(layout, software):
        return tokens
    dispatch = software.decode_tokens_per_dispatch or 0
    entries = ring_entries(model, longest=work.longest_tokens, tokens_per_dispatch=dispatch)
    if entries is None:
        return tokens
    share = windowed_share(model, stages=layout.generation_stage)
    # Devices that share positions of other layers each have complete rings of the windowed layers.
    return share * entries * layout.generation_context + (1 - share) * tokens


class CachePerSequence(NamedTuple):
    """Bytes of a device's cache for sequences of the longest length.

    Attributes:
      prompt: Bytes of a prompt, shared by its responses; 0 if responses share nothing.
      response: Bytes of each response, in addition to `prompt`.
    """

    prompt: float
    response: float

    def of(self, responses: int, *, prompts: int) -> float:
        """Return the bytes of `responses` responses to as many different prompts as possible."""
        return min(responses, prompts) * self.prompt + responses * self.response

    def fitting(self, room: np.ndarray, *, prompts: np.ndarray) -> np.ndarray:
        """Return the largest number of responses whose cache fits into `room` bytes."""
        apart = room // (self.prompt + self.response)
        return np.where(apart < prompts, apart, (room - prompts * self.prompt) // self.response)


def cache_per_sequence(model: ModelConfig, layout: Layout, work: Workload, software: Software) -> CachePerSequence:
    """Return the cache bytes per sequence on a device of a generation replica."""
    sizes = {"itemsize": software.compute_bytes, "lanes": software.cache_lanes}
    if not in_pages(layout, software):
        kept = kept_tokens(model, layout, work.longest_tokens, work, software)
        return CachePerSequence(0.0, cache_bytes(model, layout, tokens=kept, **sizes))
    shared = work.longest_prompt_tokens
    return CachePerSequence(
        shared * cache_bytes_per_token(model, layout, **sizes),
        cache_bytes(model, layout, tokens=work.longest_tokens - shared, **sizes),
    )
