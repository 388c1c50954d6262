"""Seconds of exchanges between devices in a pass: gathered weights, embeddings, tokens for experts and for heads."""

import math

from jaxrlhf.config import Layout
from jaxrlhf.models.attention.head_exchange import ExchangedHeads, exchanged_heads
from jaxrlhf.models.config import ModelConfig
from jaxrlhf.models.counts import weight_counts
from jaxrlhf.planner.cost.collectives import DeviceGroup, all_gather_s, all_reduce_s, latency_s
from jaxrlhf.planner.hardware import Hardware
from jaxrlhf.planner.workload import Role, Software


def gather_s(role: Role, layout: Layout, software: Software, hardware: Hardware, *, backward: bool) -> float:
    """Return the seconds of gathering weights split over data-parallel devices, and of scattering their gradients.

    Experts are not gathered over `expert`, the axis that divides them. A table that is only looked up is not gathered.
    """
    shard = layout.stage * layout.tensor
    weights = weight_counts(role.model, role.head)
    divided = weights.experts if layout.expert > 1 else 0
    scattered = software.gradient_bytes * (backward and role.lora is None)

    def gathered_s(number: float, group: DeviceGroup) -> float:
        held = number / shard
        seconds = (1 + backward) * all_gather_s(held * software.compute_bytes, group, hardware)
        return seconds + (all_gather_s(held * scattered, group, hardware) if scattered else 0.0)

    shared = weights.total - divided
    if not (software.head_on_last_stage or (role.head == "lm" and role.model.tie_embeddings)):
        shared -= role.model.vocab_size * role.model.hidden_size
    seconds = gathered_s(shared, DeviceGroup(layout.width_shards, shard))
    if divided:
        seconds += gathered_s(divided / layout.expert, DeviceGroup(layout.fsdp * layout.context, shard * layout.expert))
    return seconds


def lookup_s(layout: Layout, moved: float, software: Software, hardware: Hardware, *, backward: bool) -> float:
    """Return the seconds of looking up tokens in a split table.

    Parts of the width are exchanged, parts of the vocabulary are summed; the backward pass exchanges gradients.

    Args:
      moved: Bytes of the embeddings of a device's tokens.
    """
    if software.head_on_last_stage:
        return 0.0
    shard = layout.stage * layout.tensor
    exchanged = all_gather_s(moved, DeviceGroup(layout.width_shards, shard), hardware)
    return (1 + backward) * exchanged + all_reduce_s(moved, DeviceGroup(shard, 1), hardware)


def experts_exchange_s(
    model: ModelConfig, layout: Layout, stride: int, tokens: float, software: Software, hardware: Hardware
) -> float:
    """Return the seconds of one exchange of a layer with experts: tokens to the experts, or results back."""
    if layout.expert == 1:
        return 0.0
    gathered = layout.expert * tokens * model.hidden_size * software.compute_bytes
    return all_gather_s(gathered, DeviceGroup(layout.expert, stride * layout.context), hardware)


def parts_gather_s(model: ModelConfig, layout: Layout, tokens: float, hardware: Hardware) -> float:
    """Return the seconds in which devices that share a cache's positions combine one layer's softmax parts.

    A part has for each query head the weighted values, the sum of weights and the largest score, in float32.
    """
    width = model.mean_head_dim if model.latent is None else model.latent.rank
    numbers = tokens * model.num_heads / layout.generation_tensor * (width + 2)
    stride = layout.generation_stage * layout.generation_tensor
    gathered = layout.generation_context * numbers * 4
    return all_gather_s(gathered, DeviceGroup(layout.generation_context, stride), hardware)


def exchanged_of(model: ModelConfig, layout: Layout) -> ExchangedHeads:
    """Return the heads that a device has between the two exchanges for heads."""
    kv_heads = model.num_heads if model.latent is not None else math.lcm(model.num_kv_heads, layout.tensor)
    heads, kv_heads = model.num_heads // layout.tensor, kv_heads // layout.tensor
    return exchanged_heads(kv_heads, heads // kv_heads, layout.context)


def heads_exchange_s(
    model: ModelConfig, layout: Layout, tokens: float, software: Software, hardware: Hardware
) -> float:
    """Return the seconds of one layer's exchange of a device's tokens for heads, and back.

    The exchange is an all-to-all; latents are gathered. Layers with linear attention are assumed to exchange as many
    numbers.
    """
    if layout.context == 1:
        return 0.0
    group, inside = DeviceGroup(layout.context, layout.stage * layout.tensor), exchanged_of(model, layout)
    if model.latent is None:
        numbers, gathered = 2 * (inside.heads + inside.kv_heads) * model.mean_head_dim, 0
    else:
        numbers = inside.heads * (model.head_dim + model.latent.value_dim)
        gathered = layout.context * (model.latent.rank + model.latent.rope_dim)
    sent = tokens * (numbers + gathered) * software.compute_bytes
    # All parts but one cross a link: of the numbers of a device, and of the gathered latents.
    return all_gather_s(sent, group, hardware) + 3 * (group.size - 1) * latency_s(group, hardware)


def mixed_width(model: ModelConfig, layout: Layout) -> float:
    """Return the numbers per token that attention outputs on a device, including padding heads."""
    heads = exchanged_of(model, layout).heads if layout.context > 1 else model.num_heads / layout.tensor
    return heads * (model.mean_head_dim if model.latent is None else model.latent.value_dim)
