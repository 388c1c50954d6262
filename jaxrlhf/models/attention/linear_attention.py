"""Linear attention of a layer: its projections, and the state that it keeps of a sequence.

A state consists of each head's matrix and the last inputs of the convolution. Its size is independent of the number
of tokens.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Int

from jaxrlhf.batch import Array, Params
from jaxrlhf.models import linear
from jaxrlhf.models.attention.delta_rule import Steps, convolve, convolve_one, in_chunks, one_step, unit
from jaxrlhf.models.config import LinearAttention, ModelConfig
from jaxrlhf.models.norm import rms_norm


class LayerState(NamedTuple):
    """State of B slots in one layer with linear attention.

    A `Prefix` has states `[L, P, ...]` of several layers, with the two dimensions after P swapped. Key heads are then
    in the same dimension as in `key_LPSKH`.

    Attributes:
      input_BKSY: Last S = kernel - 1 inputs of the convolution, oldest first, in the activations' dtype.
      matrix_BKGXU: float32, matrix of each of the G value heads of a key head.
    """

    input_BKSY: Array
    matrix_BKGXU: Array

    def turned(self) -> "LayerState":
        """Swap the two dimensions that differ between slots and a layer of a prefix, in either direction."""
        return jax.tree.map(lambda leaf: jnp.swapaxes(leaf, 1, 2), self)

    def put(self, other: "LayerState", row_I: Array, slot_I: Array) -> "LayerState":
        """Copy state `row_I[i]` of a layer of a prefix into slot `slot_I[i]`; slots past the last are skipped."""

        def one(mine: jax.Array, new: Array) -> Array:
            return mine.at[slot_I].set(new[row_I].astype(mine.dtype), mode="drop")

        return jax.tree.map(one, self, other.turned())


def empty_state(config: LinearAttention, *lead: int, dtype: Any) -> LayerState:
    """Return zeros, the state before the first token.

    Args:
      lead: Sizes of the leading dimensions; the last of them counts slots.
    """
    group = config.value_heads // config.key_heads
    return LayerState(
        jnp.zeros((*lead, config.key_heads, config.kernel - 1, config.channels), dtype),
        jnp.zeros((*lead, config.key_heads, group, config.key_dim, config.value_dim), jnp.float32),
    )


class Projected(NamedTuple):
    """Projections of a layer's input, token by token.

    Attributes:
      input_RWKY: Inputs of the convolution: query, key and values of each key head, one after another.
      decay_RWKG: float32, logarithm of the decay.
      rate_RWKG: float32, rate of the update.
    """

    input_RWKY: Array
    decay_RWKG: Array
    rate_RWKG: Array


class MixerWeights(NamedTuple):
    """Weights between a layer's projections and the mixed values of its heads, with key heads first.

    Attributes:
      kernel_KYT: Kernel of the convolution, in the order of its inputs.
      bias_KY: Biases of the convolution, only in a state space.
      skip_KG: Factor with which a state space's values are added to its mixed values.
    """

    kernel_KYT: Array
    bias_KY: Array | None = None
    skip_KG: Array | None = None


def _to_key_heads(config: LinearAttention, head: Array, axis: int) -> Array:
    """Repeat the queries or keys of groups, so that there is one for each key head."""
    return head if config.groups is None else jnp.repeat(head, config.key_heads // config.groups, axis=axis)


def project(config: LinearAttention, weights: Params, input_RWD: Array) -> Projected:
    """Compute queries, keys and values before the convolution, and each value head's decay and rate."""

    def into(name: str) -> Array:
        return linear.project(input_RWD, weights[f"linear_{name}"])

    query_RWKX, key_RWKX = (_to_key_heads(config, into(name), 2) for name in ("query", "key"))
    value_RWKGU, slope_RWKG = into("value"), into("decay").astype(jnp.float32)
    values_RWKV = value_RWKGU.reshape(*value_RWKGU.shape[:3], -1)
    group = 1, 1, *slope_RWKG.shape[-2:]
    rate, bias = (weights[name].astype(jnp.float32).reshape(group) for name in ("decay_rate", "decay_bias"))
    step_RWKG = jax.nn.softplus(slope_RWKG + bias)
    inputs = jnp.concatenate([query_RWKX, key_RWKX, values_RWKV], axis=-1)
    rate_RWKG = step_RWKG if config.groups else jax.nn.sigmoid(into("rate").astype(jnp.float32))
    return Projected(inputs, -jnp.exp(rate) * step_RWKG, rate_RWKG)


def mixer_weights(config: LinearAttention, weights: Params) -> MixerWeights:
    """Return the weights of a layer's mixer."""

    def joined(end: str) -> Array:
        query, key, value = (weights[f"convolved_{name}{end}"] for name in ("query", "key", "value"))
        values = value.reshape(len(value), -1, *value.shape[3:])
        return jnp.concatenate([*(_to_key_heads(config, each, 0) for each in (query, key)), values], axis=1)

    if config.groups is None:
        return MixerWeights(joined(""))
    return MixerWeights(joined(""), joined("_bias"), weights["skip"].reshape(config.key_heads, -1))


def _steps(config: LinearAttention, projected: Projected, convolved_RWKY: Array) -> Steps:
    key_dim = config.key_dim
    query, key, value = jnp.split(convolved_RWKY, (key_dim, 2 * key_dim), axis=-1)
    value_RWKGU = value.reshape(*value.shape[:3], -1, config.value_dim)
    rates = value_RWKGU, projected.decay_RWKG, projected.rate_RWKG
    return Steps(unit(query) * key_dim**-0.5, unit(key), *rates) if config.groups is None else Steps(query, key, *rates)


def _added(mixed_RWKGU: Array, steps: Steps, skip_KG: Array | None) -> Array:
    """Add a state space's values, times the skip factor, to its mixed values."""
    if skip_KG is None:
        return mixed_RWKGU
    return mixed_RWKGU + skip_KG.astype(jnp.float32)[None, None, ..., None] * steps.value_RWKGU.astype(jnp.float32)


@dataclass(frozen=True)
class StateMixer:
    """Convolution and state updates as a `Mixer` of `SharedPrefix.mix`; `weights` are `MixerWeights`."""

    config: LinearAttention
    round_tokens: int = 4096

    def __call__(self, tokens: tuple[Array, ...], weights: Any, flags: Any, segment_RW: Array, /) -> Array:
        del flags
        projected, (kernel_KYT, bias_KY, skip_KG) = Projected(*tokens), weights
        convolved_RWKY = convolve(projected.input_RWKY, kernel_KYT, segment_RW, bias_KY=bias_KY)
        steps = _steps(self.config, projected, convolved_RWKY)
        mixed_RWKGU, _ = in_chunks(steps, segment_RW, corrects=self.config.groups is None)
        return _added(mixed_RWKGU, steps, skip_KG)


def mix_rows(
    config: LinearAttention,
    projected: Projected,
    weights: MixerWeights,
    segment_RW: Int[Array, "R W"],
    real_RW: Bool[Array, "R W"],
    state: LayerState | None = None,
) -> tuple[Array, LayerState]:
    """Mix packed rows, or continue one sequence in each row.

    Args:
      real_RW: False for tokens that leave states unchanged; no real token follows such a token in its row.
      state: States that rows continue from; None starts from zeros.

    Returns:
      Mixed values, `[R, W, K, G, U]`, and the states after each row's last real token.
    """
    before_RSKY = matrix_RKGXU = None
    if state is not None:
        before_RSKY, matrix_RKGXU = jnp.swapaxes(state.input_BKSY, 1, 2), state.matrix_BKGXU
    convolved_RWKY = convolve(projected.input_RWKY, weights.kernel_KYT, segment_RW, before_RSKY, weights.bias_KY)
    # Padding gets the number of the segment before it, so that it does not reset the state.
    segment_RW = jax.lax.cummax(jnp.asarray(segment_RW), axis=1)
    kept_RW11 = real_RW[:, :, None, None]
    projected = projected._replace(
        decay_RWKG=jnp.where(kept_RW11, projected.decay_RWKG, 0.0),
        rate_RWKG=jnp.where(kept_RW11, projected.rate_RWKG, 0.0),
    )
    steps = _steps(config, projected, convolved_RWKY)
    mixed_RWKGU, matrix_RKGXU = in_chunks(steps, segment_RW, matrix_RKGXU, corrects=config.groups is None)
    if before_RSKY is None:
        inputs_RWKY = projected.input_RWKY
        before_RSKY = jnp.zeros((len(real_RW), config.kernel - 1, *inputs_RWKY.shape[2:]), inputs_RWKY.dtype)
    whole_RVKY = jnp.concatenate([before_RSKY.astype(projected.input_RWKY.dtype), projected.input_RWKY], axis=1)
    at_RS = real_RW.sum(axis=1)[:, None] + jnp.arange(before_RSKY.shape[1])[None]
    last_RSKY = jnp.take_along_axis(whole_RVKY, at_RS[:, :, None, None], axis=1)
    return _added(mixed_RWKGU, steps, weights.skip_KG), LayerState(jnp.swapaxes(last_RSKY, 1, 2), matrix_RKGXU)


def mix_slots(
    config: LinearAttention,
    projected: Projected,
    weights: MixerWeights,
    state: LayerState,
    count_B: Int[Array, "B"],
) -> tuple[Array, LayerState]:
    """Mix T tokens of every slot, one after another.

    Args:
      count_B: Number of first tokens that change the state of each slot.

    Returns:
      Mixed values, `[B, T, K, G, U]`, of which those of later tokens are meaningless, and the states.
    """
    width, mixed = projected.input_RWKY.shape[1], []
    for at in range(width):
        token = projected if width == 1 else Projected(*(leaf[:, at : at + 1] for leaf in projected))
        one, state = _mix_token(config, token, weights, state, at < count_B)
        mixed.append(one)
    return mixed[0] if width == 1 else jnp.concatenate(mixed, axis=1), state


class Unsettled(NamedTuple):
    """State of B slots before T tokens, and what the tokens change, until it is known how many of them are taken."""

    state: LayerState
    projected: Projected
    weights: MixerWeights

    def settled(self, config: LinearAttention, count_B: Int[Array, "B"]) -> LayerState:
        """Return the state after the first `count_B` tokens."""
        return mix_slots(config, self.projected, self.weights, self.state, count_B)[1]


def _mix_token(
    config: LinearAttention,
    projected: Projected,
    weights: MixerWeights,
    state: LayerState,
    working_B: Bool[Array, "B"],
) -> tuple[Array, LayerState]:
    """Mix one token of every slot, `W = 1`; the state of slots that do not work stays unchanged."""
    before_BSKY = jnp.swapaxes(state.input_BKSY, 1, 2)
    convolved_B1KY = convolve_one(projected.input_RWKY, weights.kernel_KYT, before_BSKY, weights.bias_KY)
    # Otherwise XLA for GPUs fuses norms with concatenations of the convolution, and fails to compile them.
    convolved_B1KY = jax.lax.optimization_barrier(convolved_B1KY)
    steps = _steps(config, projected, convolved_B1KY)
    mixed_B1KGU, matrix_BKGXU = one_step(state.matrix_BKGXU, steps, corrects=config.groups is None)
    newest_BK1Y = jnp.swapaxes(projected.input_RWKY, 1, 2).astype(state.input_BKSY.dtype)
    new = LayerState(jnp.concatenate([state.input_BKSY, newest_BK1Y], axis=2)[:, :, 1:], matrix_BKGXU)

    def chosen(new: Array, old: Array) -> Array:
        return jnp.where(jnp.expand_dims(working_B, tuple(range(1, new.ndim))), new, old)

    return _added(mixed_B1KGU, steps, weights.skip_KG), jax.tree.map(chosen, new, state)


def gated_output(weights: Params, config: ModelConfig, input_RWD: Array, mixed_RWKGU: Array) -> Array:
    """Normalize mixed values and multiply them by silu of their gates, `[R, W, V, U]`; a state space gates first."""
    assert config.linear is not None, "only linear attention has gates"
    gate_RWKGU = jax.nn.silu(linear.project(input_RWD, weights["linear_gate"]).astype(jnp.float32))
    scale, groups = weights["mixed_norm"].astype(jnp.float32), config.linear.groups
    rows, width, _, _, value_dim = mixed_RWKGU.shape
    if groups is None:
        normed_RWKGU = rms_norm(mixed_RWKGU.astype(input_RWD.dtype), scale, config.rms_norm_eps)
        output_RWVU = (normed_RWKGU * gate_RWKGU).reshape(rows, width, -1, value_dim)
    else:
        gated = (mixed_RWKGU * gate_RWKGU).reshape(rows, width, groups, -1)
        normed = rms_norm(gated, jnp.ones(gated.shape[-1:], jnp.float32), config.rms_norm_eps)
        output_RWVU = normed.reshape(rows, width, -1, value_dim) * scale[None, None]
    return output_RWVU.astype(input_RWD.dtype)
