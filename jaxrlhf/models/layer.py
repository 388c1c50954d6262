"""One layer of the decoder: attention and the MLP, each added to the residual stream."""

import jax.numpy as jnp

from jaxrlhf.batch import Array, Params
from jaxrlhf.models import linear
from jaxrlhf.models.attention.attention import Attention, attend
from jaxrlhf.models.attention.chunks import Chunk, attend_chunk
from jaxrlhf.models.attention.kv_cache import LayerCache
from jaxrlhf.models.attention.mla import attend_latents, expanded, latents
from jaxrlhf.models.attention.pages import LayerPages
from jaxrlhf.models.attention.score_mod import ScoreMod
from jaxrlhf.models.attention.shared_prefix import SharedPrefix, attend_shared_prefix
from jaxrlhf.models.config import ModelConfig
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
    attention: Attention,
    router: RouterInputs = NO_ROUTER_INPUTS,
):
    """Run a layer over packed rows, by their segments or their shared prefixes, or over a chunk of prompts.

    Returns:
      The hidden states, the layer's keys and values as the cache keeps them, and its router's outputs or None.
    """
    query_RWNH, *kept = _heads(layer, config, hidden_RWD, turn, attention)

    def all_heads(key_RWKH: Array, value_RWKH: Array) -> tuple[Array, Array]:
        if config.latent is None:
            return key_RWKH, value_RWKH
        return expanded(layer["attention"], config, config.latent, key_RWKH, value_RWKH)

    arrays, score_mod = (query_RWNH, *all_heads(*kept)), _score_mod(layer, config)
    if isinstance(seen, SharedPrefix):
        mixed_RWNH = attend_shared_prefix(*arrays, seen, score_mod, attention=attention)
    elif isinstance(seen, Chunk):
        tokens = hidden_RWD.shape[1]
        mixed_RWNH = attend_chunk(*arrays, lambda at: all_heads(*seen.before(at, tokens=tokens)), seen.start, score_mod)
    else:
        mixed_RWNH = attend(*arrays, seen, score_mod, attention=attention)
    hidden_RWD, routed = _finish(layer, config, hidden_RWD, mixed_RWNH, attention, router)
    return hidden_RWD, *kept, routed


def layer_slots(
    layer: Params,
    config: ModelConfig,
    hidden_B1D: Array,
    turn: Rotations,
    position_B: Array,
    entry_B: Array,
    stored: LayerCache | LayerPages,
    attention: Attention,
):
    """Run a layer over one token per slot, whose keys and values become entry `entry_B` of the cache.

    Returns:
      The hidden states, the layer's cache, and its router's outputs or None.
    """
    query_B1NH, key_B1KH, value_B1KH = _heads(layer, config, hidden_B1D, turn, attention)
    stored = stored.write(key_B1KH[:, 0], value_B1KH[:, 0], entry_B, attention=attention)
    query_BNH, score_mod = query_B1NH[:, 0], _score_mod(layer, config)
    if config.latent is not None:
        assert isinstance(stored, LayerCache), "latents do not lie in pages"
        mixed_BNH = attend_latents(layer["attention"], config, config.latent, query_BNH, stored, position_B, score_mod)
    else:
        mixed_BNH = stored.attend(query_BNH, position_B, score_mod, attention=attention)
    hidden_B1D, routed = _finish(layer, config, hidden_B1D, mixed_BNH[:, None], attention, NO_ROUTER_INPUTS)
    return hidden_B1D, stored, routed


def repeat_heads(head_KH: Array, copies: int) -> Array:
    """`[..., K, H]` key-value heads, each so many times in a row, beside the query heads that read them."""
    return head_KH if copies == 1 else jnp.repeat(head_KH, copies, axis=-2)


def _slides(layer: Params) -> Array | None:
    """True if this layer has the window; None where all layers are alike."""
    return layer["slides"][0] if "slides" in layer else None


def _score_mod(layer: Params, config: ModelConfig) -> ScoreMod:
    return ScoreMod(config.score_divisor, config.attn_logit_softcapping, config.sliding_window, _slides(layer))


def _heads(
    layer: Params, config: ModelConfig, hidden_RWD: Array, turns: Rotations, kernels: Attention
) -> tuple[Array, Array, Array]:
    """Rotated queries of a layer's input, and its rotated keys and values, or the latents that keep them."""
    attention, turn = layer["attention"], turns.of_layer(_slides(layer))
    input_RWD = hidden_RWD if config.norms == "post" else norm(config, hidden_RWD, layer["attention_norm"])
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
    key_RWKH, copies = rotate(key_RWKH, turn), 1 if "qkv" in attention else kernels.kv_copies
    return rotate(query_RWNH, turn), repeat_heads(key_RWKH, copies), repeat_heads(value_RWKH, copies)


def _head_norm(config: ModelConfig, head_RWNH: Array, weight: Array) -> Array:
    """Norm of each head, or of all heads as one."""
    if not config.qk_norm_across_heads:
        return norm(config, head_RWNH, weight)
    whole_RWC = head_RWNH.reshape(*head_RWNH.shape[:2], -1)
    return norm(config, whole_RWC, weight.reshape(-1)).reshape(head_RWNH.shape)


def _finish(
    layer: Params, config: ModelConfig, hidden_RWD: Array, mixed_RWNH: Array, attention: Attention, router: RouterInputs
) -> tuple[Array, RouterOutputs | None]:
    """Output projection and MLP, each added to the residual stream."""

    def added(name: str, output_RWD: Array) -> Array:
        return output_RWD if config.norms == "pre" else norm(config, output_RWD, layer[f"{name}_output_norm"])

    hidden_RWD += added("attention", linear.project(mixed_RWNH, layer["attention"]["output"], dims=2))
    input_RWD = hidden_RWD if config.norms == "post" else norm(config, hidden_RWD, layer["mlp_norm"])
    output_RWD, routed = feed_forward(layer["mlp"], config, input_RWD, attention=attention, router=router)
    return hidden_RWD + added("mlp", output_RWD), routed
