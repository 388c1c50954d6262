"""One layer of the decoder: attention and the MLP, each added to the residual stream."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from jaxrlhf.batch import Array, Params
from jaxrlhf.models import linear
from jaxrlhf.models.attention.attention import attend
from jaxrlhf.models.attention.chunks import Chunk, attend_chunk
from jaxrlhf.models.attention.kv_cache import LayerCache
from jaxrlhf.models.attention.mla import attend_latents, expanded, latents
from jaxrlhf.models.attention.pages import LayerPages
from jaxrlhf.models.attention.score_mod import ScoreMod
from jaxrlhf.models.attention.shared_prefix import SharedPrefix, attend_shared_prefix
from jaxrlhf.models.config import ModelConfig
from jaxrlhf.models.execution import Execution
from jaxrlhf.models.mlp import feed_forward
from jaxrlhf.models.moe.experts import NO_ROUTER_INPUTS, RouterInputs, RouterOutputs
from jaxrlhf.models.norm import norm
from jaxrlhf.models.rope import Rotations, rotate


def layer_rows(
    layer: Params,
    config: ModelConfig,
    hidden_RWD: Array,
    turn: Rotations,
    seen: Array | SharedPrefix | Chunk,
    execution: Execution,
    router: RouterInputs = NO_ROUTER_INPUTS,
):
    """Run a layer over packed rows, by their segments or their shared prefixes, or over a chunk of prompts.

    Returns:
      The hidden states, the layer's keys and values as the cache keeps them, and its router's outputs or None.
    """
    weights, score_mod = layer["attention"], _score_mod(layer, config)

    def all_heads(key_RWKH: Array, value_RWKH: Array) -> tuple[Array, Array]:
        if config.latent is None:
            return key_RWKH, value_RWKH
        return expanded(weights, config, config.latent, key_RWKH, value_RWKH)

    def mix(input_RWD: Array) -> tuple[Array, tuple[Array, Array]]:
        query_RWNH, key_RWKH, value_RWKH = _heads(layer, config, input_RWD, turn, execution)
        kept = key_RWKH, value_RWKH
        arrays = (query_RWNH, *all_heads(*kept))
        if isinstance(seen, SharedPrefix):
            return attend_shared_prefix(*arrays, seen, score_mod, execution=execution), kept
        if isinstance(seen, Chunk):
            chunk, tokens = seen, input_RWD.shape[1]
            return attend_chunk(
                *arrays, lambda at: all_heads(*chunk.before(at, tokens=tokens)), chunk.start, score_mod
            ), kept
        return attend(*arrays, seen, score_mod, execution=execution), kept

    hidden_RWD, (key, value), routed = _block(layer, config, hidden_RWD, mix, execution, router)
    return hidden_RWD, key, value, routed


def layer_slots(
    layer: Params,
    config: ModelConfig,
    hidden_B1D: Array,
    turn: Rotations,
    position_B: Array,
    entry_B: Array,
    stored: LayerCache | LayerPages,
    execution: Execution,
):
    """Run a layer over one token per slot, whose keys and values become entry `entry_B` of the cache.

    Returns:
      The hidden states, the layer's cache, and its router's outputs or None.
    """
    weights, score_mod = layer["attention"], _score_mod(layer, config)

    def mix(input_B1D: Array) -> tuple[Array, LayerCache | LayerPages]:
        query_B1NH, key_B1KH, value_B1KH = _heads(layer, config, input_B1D, turn, execution)
        written = stored.write(key_B1KH[:, 0], value_B1KH[:, 0], entry_B, execution=execution)
        query_BNH = query_B1NH[:, 0]
        if config.latent is not None:
            assert isinstance(written, LayerCache), "latents do not lie in pages"
            mixed_BNH = attend_latents(weights, config, config.latent, query_BNH, written, position_B, score_mod)
        else:
            mixed_BNH = written.attend(query_BNH, position_B, score_mod, execution=execution)
        return mixed_BNH[:, None], written

    return _block(layer, config, hidden_B1D, mix, execution, NO_ROUTER_INPUTS)


def _block(
    layer: Params,
    config: ModelConfig,
    hidden_RWD: Array,
    mix: Callable[[Array], tuple[Array, Any]],
    execution: Execution,
    router: RouterInputs,
) -> tuple[Array, Any, RouterOutputs | None]:
    """Attention and the MLP, each added to the residual stream.

    Args:
      mix: Attention of the tokens of a normed input, `[R, W, N, H]`, and what the layer keeps of them.
    """

    def before(part: str) -> Array:
        return hidden_RWD if config.norms == "post" else norm(config, hidden_RWD, layer[f"{part}_norm"])

    def after(part: str, output_RWD: Array) -> Array:
        if config.norms != "pre":
            output_RWD = norm(config, output_RWD, layer[f"{part}_output_norm"])
        return output_RWD if config.residual_multiplier == 1.0 else output_RWD * config.residual_multiplier

    mixed_RWNH, kept = mix(before("attention"))
    mixed_RWD = linear.project(mixed_RWNH, layer["attention"]["output"], dims=2)
    if config.output_bias:
        mixed_RWD += layer["attention"]["output_bias"].astype(mixed_RWD.dtype)[None, None]
    hidden_RWD += after("attention", mixed_RWD)
    output_RWD, routed = feed_forward(layer["mlp"], config, before("mlp"), execution=execution, router=router)
    hidden_RWD += after("mlp", output_RWD)
    return hidden_RWD, kept, routed


def repeat_heads(head_KH: Array, copies: int) -> Array:
    """`[..., K, H]` key-value heads, each so many times in a row, beside the query heads that read them."""
    return head_KH if copies == 1 else jnp.repeat(head_KH, copies, axis=-2)


def _flag(layer: Params, name: str) -> Array | None:
    """One of `LAYER_FLAGS` of this layer; None where all layers are alike."""
    return layer[name][0] if name in layer else None


def _score_mod(layer: Params, config: ModelConfig) -> ScoreMod:
    return ScoreMod(
        config.score_divisor,
        config.attn_logit_softcapping,
        config.sliding_window,
        _flag(layer, "slides"),
        layer["attention"].get("sinks"),
    )


def _heads(
    layer: Params, config: ModelConfig, input_RWD: Array, turns: Rotations, execution: Execution
) -> tuple[Array, Array, Array]:
    """Rotated queries of a layer's input, and its rotated keys and values, or the latents that keep them."""
    attention, turn = layer["attention"], turns.of_layer(_flag(layer, "slides"), _flag(layer, "turns"))
    if config.latent is not None:
        return latents(attention, config, config.latent, input_RWD, turn)

    def project(name: str) -> Array:
        heads = linear.project(input_RWD, attention[name])
        return heads + attention[f"{name}_bias"].astype(heads.dtype)[None, None] if config.qkv_bias else heads

    if "qkv" in attention:
        joined_RWKMH = project("qkv")
        query_RWNH = joined_RWKMH[:, :, :, :-2].reshape(*input_RWD.shape[:2], config.num_heads, config.head_dim)
        key_RWKH, value_RWKH = joined_RWKMH[:, :, :, -2], joined_RWKMH[:, :, :, -1]
    else:
        query_RWNH, key_RWKH, value_RWKH = project("query"), project("key"), project("value")
    if config.qk_norm:
        query_RWNH = _head_norm(config, query_RWNH, attention["query_norm"])
        key_RWKH = _head_norm(config, key_RWKH, attention["key_norm"])
    query_RWNH, key_RWKH = (
        rotate(heads, turn, interleaved=config.rope_interleaved) for heads in (query_RWNH, key_RWKH)
    )
    if turns.growth_RW is not None:
        query_RWNH = (query_RWNH * turns.growth_RW[:, :, None, None]).astype(query_RWNH.dtype)
    copies = 1 if "qkv" in attention else execution.kv_copies
    return query_RWNH, repeat_heads(key_RWKH, copies), repeat_heads(value_RWKH, copies)


def _head_norm(config: ModelConfig, head_RWNH: Array, weight: Array) -> Array:
    """Norm of each head, or of all heads as one."""
    if not config.qk_norm_across_heads:
        return norm(config, head_RWNH, weight)
    whole_RWC = head_RWNH.reshape(*head_RWNH.shape[:2], -1)
    return norm(config, whole_RWC, weight.reshape(-1)).reshape(head_RWNH.shape)
