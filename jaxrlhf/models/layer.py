"""One layer of the decoder: attention and the MLP, each added to the residual stream."""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Float

from jaxrlhf.architecture import ModelConfig
from jaxrlhf.batch import Array, Params
from jaxrlhf.models import linear
from jaxrlhf.models.attention import Attention, attend, attend_cache
from jaxrlhf.models.cache import LayerCache
from jaxrlhf.models.mlp import feed_forward
from jaxrlhf.models.rope import Rotation, rotate
from jaxrlhf.models.spread import Spread, attend_spread


def layer_rows(
    layer: Params, config: ModelConfig, hidden_RWD: Array, turn: Rotation, seen: Array | Spread, attention: Attention
):
    """One layer over packed rows, whose tokens see their segment or what is spread; also its keys and values."""
    query_RWNH, key_RWKH, value_RWKH = _heads(layer, config, hidden_RWD, turn)
    if isinstance(seen, Spread):
        mixed_RWNH = attend_spread(query_RWNH, key_RWKH, value_RWKH, seen, attention=attention)
    else:
        mixed_RWNH = attend(query_RWNH, key_RWKH, value_RWKH, seen, attention=attention)
    return _finish(layer, config, hidden_RWD, mixed_RWNH), key_RWKH, value_RWKH


def layer_slots(
    layer: Params,
    config: ModelConfig,
    hidden_B1D: Array,
    turn: Rotation,
    position_B: Array,
    entry_B: Array,
    stored: LayerCache,
    attention: Attention,
):
    """One layer over one token per slot, whose keys and values become the cache's entry `entry`."""
    query_B1NH, key_B1KH, value_B1KH = _heads(layer, config, hidden_B1D, turn)
    stored = stored.write(key_B1KH[:, 0], value_B1KH[:, 0], entry_B)
    mixed_BNH = attend_cache(query_B1NH[:, 0], stored.key_BKHS, stored.value_BKSH, position_B, attention=attention)
    return _finish(layer, config, hidden_B1D, mixed_BNH[:, None]), stored


def join_projections(attention: Params) -> Params:
    """Queries, keys and values side by side for each key-value head, so that they stay where their head is."""

    def join(suffix: str) -> Array:
        query, key, value = (attention[f"{name}{suffix}"] for name in ("query", "key", "value"))
        *before, kv_heads, head_dim = key.shape
        return jnp.concatenate([part.reshape(*before, kv_heads, -1, head_dim) for part in (query, key, value)], axis=-2)

    apart = {f"{name}{suffix}" for name in ("query", "key", "value") for suffix in ("", "_bias")}
    rest = {name: leaf for name, leaf in attention.items() if name not in apart}
    return rest | {f"qkv{suffix}": join(suffix) for suffix in ("", "_bias") if f"query{suffix}" in attention}


def rms_norm(input_D: Float[Array, "*batch D"], scale_D: Float[Array, "D"], *, eps: float) -> Float[Array, "*batch D"]:
    """x / sqrt(mean(x^2) + eps) * scale over the last dimension, in float32.

    Source: Zhang and Sennrich 2019 (arXiv:1910.07467), eq. 4.
    """
    wide_D = input_D.astype(jnp.float32)
    inverse_1 = jax.lax.rsqrt(jnp.mean(jnp.square(wide_D), axis=-1, keepdims=True) + eps)
    scale_D = jnp.expand_dims(scale_D.astype(jnp.float32), tuple(range(input_D.ndim - 1)))
    return (wide_D * inverse_1 * scale_D).astype(input_D.dtype)


def _heads(layer: Params, config: ModelConfig, hidden_RWD: Array, turn: Rotation) -> tuple[Array, Array, Array]:
    """Normalised input to rotated queries, rotated keys, and values."""
    attention = layer["attention"]
    norm = partial(rms_norm, eps=config.rms_norm_eps)
    normed_RWD = norm(hidden_RWD, layer["attention_norm"])

    def project(name: str) -> Array:
        heads = linear.project(normed_RWD, attention[name])
        return heads + attention[f"{name}_bias"].astype(heads.dtype)[None, None] if config.qkv_bias else heads

    if "qkv" in attention:
        joined_RWKMH = project("qkv")
        query_RWNH = joined_RWKMH[:, :, :, :-2].reshape(*normed_RWD.shape[:2], config.num_heads, config.head_dim)
        key_RWKH, value_RWKH = joined_RWKMH[:, :, :, -2], joined_RWKMH[:, :, :, -1]
    else:
        query_RWNH, key_RWKH, value_RWKH = project("query"), project("key"), project("value")
    if config.qk_norm:
        query_RWNH = norm(query_RWNH, attention["query_norm"])
        key_RWKH = norm(key_RWKH, attention["key_norm"])
    return rotate(query_RWNH, turn), rotate(key_RWKH, turn), value_RWKH


def _finish(layer: Params, config: ModelConfig, hidden_RWD: Array, mixed_RWNH: Array) -> Array:
    """Output projection and gated MLP, each added to the residual stream."""
    hidden_RWD += linear.project(mixed_RWNH, layer["attention"]["output"], dims=2)
    normed_RWD = rms_norm(hidden_RWD, layer["mlp_norm"], eps=config.rms_norm_eps)
    return hidden_RWD + feed_forward(layer["mlp"], config, normed_RWD)
