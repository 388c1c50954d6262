"""Decoder layer: attention and the MLP, each added to the residual stream."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxrlhf.batch import Array, Params
from jaxrlhf.models import linear
from jaxrlhf.models.attention import linear_attention
from jaxrlhf.models.attention.attention import each_token
from jaxrlhf.models.attention.head_exchange import HeadExchange
from jaxrlhf.models.attention.kv_cache import LayerCache, Prefix
from jaxrlhf.models.attention.linear_attention import LayerState, Projected, Unsettled
from jaxrlhf.models.attention.mask import AttentionMask, Heads
from jaxrlhf.models.attention.mla import attend_latents, expanded, latents
from jaxrlhf.models.attention.pages import LayerPages
from jaxrlhf.models.attention.score_mod import ScoreMod
from jaxrlhf.models.config import LinearAttention, ModelConfig
from jaxrlhf.models.execution import Execution
from jaxrlhf.models.mlp import feed_forward
from jaxrlhf.models.moe.experts import NO_ROUTER_INPUTS, RouterInputs, RouterOutputs
from jaxrlhf.models.norm import norm, rms_norm
from jaxrlhf.models.residual.layer_inputs import of_input
from jaxrlhf.models.residual.streams import corrected, predicted
from jaxrlhf.models.rope import Rotations, rotate


def layer_rows(
    layer: Params,
    config: ModelConfig,
    hidden_RWD: Array,
    turn: Rotations,
    mask: AttentionMask,
    execution: Execution,
    router: RouterInputs = NO_ROUTER_INPUTS,
    *,
    borrowed: Prefix | None = None,
    input_RWP: Array | None = None,
):
    """Run a layer over packed rows, or over a chunk of prompts.

    Args:
      config: Configuration as the layer's stack sees it (`ModelConfig.of_stack`).
      mask: Tokens that each token sees: `Segments`, `SharedTokens`, `SharedPrefix` or `Chunk`.
      borrowed: Keys and values of another layer, for a layer that makes none.
      input_RWP: The layer's own input; None if layers have none.

    Returns:
      The hidden states; the layer's keys and values as the cache keeps them, or its states; and its router's outputs
      or None.
    """
    weights, score_mod = layer["attention"], _score_mod(layer, config)
    if config.linear is not None and "linear_query" in weights:
        mix_linear = partial(_linear_rows, weights, config, config.linear, mask, execution)
        return _block(layer, config, hidden_RWD, mix_linear, execution, router, input_RWP)

    matrix_CNU = weights.get("key_value")

    def all_heads(matrix_CNU: Any, key_RWKH: Array, value_RWKH: Array) -> tuple[Array, Array]:
        if config.latent is None:
            return key_RWKH, value_RWKH
        return expanded(matrix_CNU, config, config.latent, key_RWKH, value_RWKH)

    def mix(input_RWD: Array) -> tuple[Array, Prefix | None]:
        query_RWNH, gate_RWNH, made = _heads(layer, config, input_RWD, turn, execution)
        kept = made or borrowed
        assert kept is not None, "a layer without keys and values must borrow them"
        key_RWKH, value_RWKH = kept.key_LPSKH, kept.value_LPSKH
        exchange = _exchange_of(config, execution)
        if config.latent is None:
            exchanged = exchange.keys(key_RWKH), exchange.keys(value_RWKH)
        else:
            keys, values = all_heads(matrix_CNU, exchange.gathered(key_RWKH), exchange.gathered(value_RWKH))
            exchanged = exchange.made(keys), exchange.made(values)
        heads = Heads(exchange.queries(query_RWNH), *exchanged, (matrix_CNU, all_heads))
        mixed_RWNH = mask.attend(heads, exchange.score_mod(score_mod), exchange.inside)
        return _gated(exchange.back(mixed_RWNH), gate_RWNH), made

    return _block(layer, config, hidden_RWD, mix, execution, router, input_RWP)


def _exchange_of(config: ModelConfig, execution: Execution) -> HeadExchange:
    """Return the token-head exchange (context parallelism) of a layer's attention."""
    kv_heads = config.num_kv_heads * execution.kv_copies(config.num_kv_heads)
    kv_heads = config.num_heads if config.latent is not None else kv_heads
    return HeadExchange(execution, kv_heads, config.num_heads // kv_heads)


def _linear_rows(
    weights: Params,
    config: ModelConfig,
    linear: LinearAttention,
    mask: AttentionMask,
    execution: Execution,
    input_RWD: Array,
) -> tuple[Array, LayerState | None]:
    """Run linear attention over a normed input. Return its output `[R, W, V, U]` and the states after the rows."""
    exchange = HeadExchange(execution, linear.key_heads)
    projected = Projected(*map(exchange.keys, linear_attention.project(linear, weights, input_RWD)))
    mixing = jax.tree.map(exchange.weights, linear_attention.mixer_weights(linear, weights))
    mixed_RWKGU, state = mask.mix_states(linear, projected, mixing)
    kept = None if state is None else state.turned()
    return linear_attention.gated_output(weights, config, input_RWD, exchange.back(mixed_RWKGU)), kept


def layer_slots(
    layer: Params,
    config: ModelConfig,
    hidden_BTD: Array,
    turn: Rotations,
    position_B: Array,
    entry_B: Array,
    stored: LayerCache | LayerPages | LayerState,
    execution: Execution,
    working_B: Array | None = None,
    *,
    input_BTP: Array | None = None,
):
    """Run a layer over T consecutive tokens per slot. Their keys and values become cache entries, from `entry_B` on.

    Args:
      config: Configuration as the layer's stack sees it (`ModelConfig.of_stack`).
      position_B: Position of the first token of each slot.
      stored: Cache of the layer, or of the layer that it borrows from. A borrowed cache is not written to.
      working_B: False for slots whose state stays unchanged, in layers with states.

    Returns:
      The hidden states, the layer's cache (`Unsettled` for a state and T > 1), and its router's outputs or None.
    """
    weights, score_mod = layer["attention"], _score_mod(layer, config)

    if isinstance(stored, LayerState):
        mix_linear = partial(_linear_slots, weights, config, stored, working_B)
        return _block(layer, config, hidden_BTD, mix_linear, execution, NO_ROUTER_INPUTS, input_BTP)

    def mix(input_BTD: Array) -> tuple[Array, LayerCache | LayerPages]:
        query_BTNH, gate_BTNH, made = _heads(layer, config, input_BTD, turn, execution)
        written, latent = stored, config.latent
        if made is not None:
            entry_BT = entry_B[:, None] + jnp.arange(input_BTD.shape[1])[None]
            written = written.write(made.key_LPSKH, made.value_LPSKH, entry_BT, execution=execution)
        if latent is None:
            mixed_BTNH = written.attend(query_BTNH, position_B, score_mod, execution=execution)
            return _gated(mixed_BTNH, gate_BTNH), written
        assert isinstance(written, LayerCache), "latent attention has no cache in pages"

        def one(query_BNH: Array, position_B: Array) -> Array:
            arrays = query_BNH, written, position_B, score_mod
            return attend_latents(weights, config, latent, *arrays, execution=execution)

        return _gated(each_token(one, query_BTNH, position_B), gate_BTNH), written

    return _block(layer, config, hidden_BTD, mix, execution, NO_ROUTER_INPUTS, input_BTP)


def _linear_slots(
    weights: Params, config: ModelConfig, stored: LayerState, working_B: Array | None, input_BTD: Array
) -> tuple[Array, LayerState | Unsettled]:
    """Run linear attention over T tokens of every slot. Return its output and the new states, unsettled for T > 1."""
    assert config.linear is not None and working_B is not None, "only layers with linear attention have states"
    projected = linear_attention.project(config.linear, weights, input_BTD)
    mixing, width = linear_attention.mixer_weights(config.linear, weights), input_BTD.shape[1]
    mixed_BTKGU, state = linear_attention.mix_slots(config.linear, projected, mixing, stored, width * working_B)
    kept = state if width == 1 else Unsettled(stored, projected, mixing)
    return linear_attention.gated_output(weights, config, input_BTD, mixed_BTKGU), kept


def _gated(mixed_RWNH: Array, gate_RWNH: Array | None) -> Array:
    """Multiply the output of attention heads by the sigmoid of their gates."""
    return mixed_RWNH if gate_RWNH is None else mixed_RWNH * jax.nn.sigmoid(gate_RWNH)


def _block(
    layer: Params,
    config: ModelConfig,
    hidden_RWC: Array,
    mix: Callable[[Array], tuple[Array, Any]],
    execution: Execution,
    router: RouterInputs,
    input_RWP: Array | None,
) -> tuple[Array, Any, RouterOutputs | None]:
    """Add attention, the MLP and the product with the layer's own input to the residual stream.

    With several streams, attention and the MLP are added to the first stream, which then corrects all streams. The
    product with the layer's own input is added to the other streams.

    Args:
      hidden_RWC: Residual stream, or several streams side by side.
      mix: Attention as a function of a normed input. It returns the output of each head, `[R, W, N, H]`, and the
        keys and values or states to keep.
    """

    def before(part: str) -> Array:
        return hidden_RWD if config.norms == "post" else norm(config, hidden_RWD, layer[f"{part}_norm"])

    def after(part: str, output_RWD: Array) -> Array:
        if config.norms != "pre":
            output_RWD = norm(config, output_RWD, layer[f"{part}_output_norm"])
        return output_RWD if config.residual_multiplier == 1.0 else output_RWD * config.residual_multiplier

    streams_RWAD = None if config.streams is None else predicted(layer, config, hidden_RWC)
    hidden_RWD = hidden_RWC if streams_RWAD is None else streams_RWAD[:, :, 0]
    normed_RWD = before("attention")
    mixed_RWNH, kept = mix(normed_RWD)
    mixed_RWD = linear.project(mixed_RWNH, layer["attention"]["output"], dims=2)
    if config.output_bias:
        mixed_RWD += layer["attention"]["output_bias"].astype(mixed_RWD.dtype)[None, None]
    hidden_RWD += after("attention", mixed_RWD)
    if config.laurel_rank is not None:
        hidden_RWD = (hidden_RWD + _augmented(layer, config, normed_RWD)) * 0.5**0.5
    given = before("mlp"), hidden_RWD, _flag(layer, "cut")
    output_RWD, routed = feed_forward(layer["mlp"], config, *given, execution=execution, router=router)
    hidden_RWD += after("mlp", output_RWD)
    if config.streams is not None and streams_RWAD is not None:
        streams_RWAD = corrected(layer, config, streams_RWAD, hidden_RWD)
        first_RWD = streams_RWAD[:, :, 0] * layer["streams"]["scale"].astype(hidden_RWD.dtype)[None, None]
        assert input_RWP is not None, "layers with several streams require layer inputs"
        added_RWD = of_input(layer, config, first_RWD, input_RWP)
        other_A = (jnp.arange(config.streams.count) > 0).astype(added_RWD.dtype)
        streams_RWAD += added_RWD[:, :, None] * other_A[None, None, :, None]
        return streams_RWAD.reshape(hidden_RWC.shape), kept, routed
    if input_RWP is not None:
        hidden_RWD += of_input(layer, config, hidden_RWD, input_RWP)
    if "scale" in layer:
        hidden_RWD *= jax.lax.stop_gradient(layer["scale"]).astype(hidden_RWD.dtype)[None, None]
    return hidden_RWD, kept, routed


def _augmented(layer: Params, config: ModelConfig, normed_RWD: Array) -> Array:
    """Return a layer's normed input plus a normed product of the input with two narrow matrices.

    Source: Menghani et al. 2024 (LAuReL, arXiv:2411.07501), section 2.
    """
    own = layer["laurel"]
    low_RWD = linear.project(linear.project(normed_RWD, own["narrow"]), own["widen"])
    return normed_RWD + norm(config, low_RWD, own["norm"])


def repeat_heads(head_KH: Array, copies: int) -> Array:
    """Repeat each key-value head of `[..., K, H]` `copies` times in a row, to match the query heads that read it."""
    return head_KH if copies == 1 else jnp.repeat(head_KH, copies, axis=-2)


def _flag(layer: Params, name: str) -> Array | None:
    """Return one of `LAYER_FLAGS` for this layer; None if all layers are alike."""
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
) -> tuple[Array, Array | None, Prefix | None]:
    """Return rotated queries of a layer's input, their gates, and its rotated keys and values, or its latents.

    Gates are None in models without attention gates. Keys and values are None in layers that borrow them.
    """
    flag = _flag(layer, "slides")
    slides = config.sliding_window is not None if flag is None else flag
    attention, turn = layer["attention"], turns.of_layer(slides, _flag(layer, "turns"))
    if config.latent is not None:
        query_RWNH, key_RWKH, value_RWKH = latents(attention, config, config.latent, input_RWD, turn)
        return turns.grown(query_RWNH), None, Prefix(key_RWKH, value_RWKH)

    def project(name: str) -> Array:
        heads = linear.project(input_RWD, attention[name])
        return heads + attention[f"{name}_bias"].astype(heads.dtype)[None, None] if config.qkv_bias else heads

    if "qkv" in attention:
        joined_RWKMH = project("qkv")
        query_RWNH = joined_RWKMH[:, :, :, :-2].reshape(*input_RWD.shape[:2], config.num_heads, -1)
        made = {"key": joined_RWKMH[:, :, :, -2], "value": joined_RWKMH[:, :, :, -1]}
    else:
        query_RWNH, made = project("query"), {name: project(name) for name in ("key", "value") if name in attention}
    gate_RWNH = None
    if config.attention_gate:
        query_RWNH, gate_RWNH = jnp.split(query_RWNH, 2, axis=-1)
    if config.qk_norm:
        query_RWNH = _head_norm(config, query_RWNH, attention["query_norm"])
    query_RWNH = turns.grown(rotate(query_RWNH, turn, interleaved=config.rope_interleaved))
    if "key" not in made:
        return query_RWNH, gate_RWNH, None
    key_RWKH, value_RWKH = made["key"], made.get("value", made["key"])
    if config.qk_norm:
        key_RWKH = _head_norm(config, key_RWKH, attention["key_norm"])
    if config.value_norm:
        value_RWKH = rms_norm(value_RWKH, jnp.ones(value_RWKH.shape[-1]), config.rms_norm_eps)
    key_RWKH = rotate(key_RWKH, turn, interleaved=config.rope_interleaved)
    copies = 1 if "qkv" in attention else execution.kv_copies(key_RWKH.shape[2])
    return query_RWNH, gate_RWNH, Prefix(repeat_heads(key_RWKH, copies), repeat_heads(value_RWKH, copies))


def _head_norm(config: ModelConfig, head_RWNH: Array, weight: Array) -> Array:
    """Normalize each head, or all heads as one vector."""
    if not config.qk_norm_across_heads:
        return norm(config, head_RWNH, weight)
    whole_RWC = head_RWNH.reshape(*head_RWNH.shape[:2], -1)
    return norm(config, whole_RWC, weight.reshape(-1)).reshape(head_RWNH.shape)
