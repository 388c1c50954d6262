"""Heads on the residual stream: logits, token log-probabilities, values, scores."""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Bool, Float, Float32, Int

from jaxrlhf.algos.objectives import TokenOutput
from jaxrlhf.batch import Array, Params
from jaxrlhf.models.causal_lm import AnyModel, causal_lm_method
from jaxrlhf.models.config import ModelConfig
from jaxrlhf.models.execution import ONE_DEVICE, Execution
from jaxrlhf.models.kernels import cpu
from jaxrlhf.models.linear import few_rows_product, transposed_product

MOST_LIKELY = 64
"""Largest number of likely tokens that are returned for one position."""
CHUNK_TOKENS = 512
"""Number of tokens whose logits exist at a time on a device: enough for a fast product."""

_NEVER = -1e9  # logit of padding rows and excluded tokens: zero probability, and finite, so that zero times it is zero


@cpu.variant(lambda: 128)  # caches then hold the logits; measured with 49 152 words
def chunk_tokens() -> int:
    """Return the number of tokens whose logits exist at a time on a device."""
    return CHUNK_TOKENS


@causal_lm_method
def table(params: Params, config: ModelConfig) -> Array:
    """Return the output table `[V, D]`. Logits are hidden states times its transpose; extra rows are padding."""
    return params["embed" if config.tie_embeddings else "head"]


def logits(params: Params, config: AnyModel, hidden_D: Float[Array, "*batch D"]) -> Float32[Array, "*batch V"]:
    """Return the logits of the next token, accumulated in float32."""
    return padded_logits(params, config, hidden_D)[..., : config.vocab_size]


def padded_logits(params: Params, config: AnyModel, hidden_D: Float[Array, "*batch D"]) -> Float32[Array, "*batch V"]:
    """Return the logits of every row of the table, so that they split evenly; padding rows have -inf."""
    table_VD = table(params, config).astype(hidden_D.dtype)
    hidden_TD = _scaled(hidden_D, config).reshape(-1, hidden_D.shape[-1])
    logit_V = few_rows_product(hidden_TD, table_VD, jnp.float32).reshape(*hidden_D.shape[:-1], -1)
    return _masked(_cap(logit_V, config.final_logit_softcapping), config.vocab_size, -jnp.inf)


def token_logp(
    params: Params,
    config: AnyModel,
    hidden_RWD: Float[Array, "R W D"],
    token_RW: Int[Array, "R W"],
    wanted_RW: Bool[Array, "R W"] | None = None,
    *,
    kept_RWK: Int[Array, "R W K"] | None = None,
    named_RWK: Int[Array, "R W C"] | None = None,
    among_V: Bool[Array, "V"] | None = None,
    temperature: float | Float[Array, ""] = 1.0,
    entropy: bool = False,
    chunk_tokens: int = CHUNK_TOKENS,
    execution: Execution = ONE_DEVICE,
) -> TokenOutput:
    """Compute log softmax(logits / temperature) of each wanted token, and on request the entropy of the distribution.

        logp[r, t] = log_softmax(logits(hidden[r, t-1]) / temperature)[token[r, t]]

    Unwanted tokens have 0. Column 0 also has 0, because no token precedes it. The first token of a later segment in
    a row is predicted from the segment before it. Its number is meaningless, and it is not trained on either.

    Logits exist for about `chunk_tokens` tokens at a time, and the backward pass recomputes them.
    Wanted tokens are moved to the front of their row, and chunks without wanted tokens are skipped.
    Each chunk takes tokens of every row, so rows and tokens that are sharded over devices stay where they are.

    Args:
      wanted_RW: True for tokens to compute; None computes all.
      kept_RWK: Token ids that the softmax is restricted to, padded with -1. All -1, or None, is no restriction.
      named_RWK: Further token ids to compute log-probabilities of, in each token's place; negative ids are padding.
      among_V: True for token ids that may be named in each token's place: the `MOST_LIKELY` most likely of these, the
        most likely first, and ids of -1 if there are fewer. Without `named_RWK`; None names none.
      entropy: True computes entropies too.
      chunk_tokens: Number of tokens of a chunk, over all devices.
      execution: Execution of the hidden states.
    """
    if wanted_RW is None:
        wanted_RW = jnp.ones(token_RW.shape, bool)
    next_RW, wanted_RW = (execution.slices(jnp.pad(each[:, 1:], ((0, 0), (0, 1)))) for each in (token_RW, wanted_RW))
    hidden_RWD, ids = execution.slices(hidden_RWD), []
    for id_RWK in (kept_RWK, named_RWK):
        padding = (0, 0), (0, 1), (0, 0)
        ids.append(None if id_RWK is None else execution.slices(jnp.pad(id_RWK[:, 1:], padding, constant_values=-1)))
    chunk = min(next_RW.shape[1], max(1, chunk_tokens // len(next_RW)))
    order = _read_order(next_RW, wanted_RW, ids, among_V, chunk)
    most = 0 if among_V is None else min(MOST_LIKELY, len(among_V))
    reading = _Reading(chunk, entropy, most, config.final_logit_softcapping, config.vocab_size, execution)
    table_VD, scale = table(params, config).astype(hidden_RWD.dtype), 1.0 / jnp.asarray(temperature, jnp.float32)

    def back(output_RM: Array) -> Array:
        place, wanted = (each.reshape(*each.shape, *[1] * (output_RM.ndim - 2)) for each in (order.place_RW, wanted_RW))
        read_RW = jnp.where(wanted, jnp.take_along_axis(output_RM, place, axis=1), 0.0)
        return _shift(execution.joined(read_RW))

    logp, *more = map(back, _read(_scaled(hidden_RWD, config), table_VD, scale, order, reading))
    entropy_RW = more.pop(0) if entropy else None
    if among_V is None:
        return TokenOutput(logp, entropy_RW, *more)
    named, names = more
    return TokenOutput(logp, entropy_RW, named, jnp.where(named > _NEVER / 2, names.astype(jnp.int32), -1))


class _ReadOrder(NamedTuple):
    """Order in which hidden states are processed; `M` is the row width, rounded up to whole chunks.

    Attributes:
      order_RM: Index in the row, for each place of the order.
      place_RW: Inverse of `order_RM`.
      target_RM: Token to predict at each place.
      chunks: Number of chunks that contain wanted tokens.
      kept_RMK: Token ids that the softmax at each place is restricted to; None is no restriction.
      named_RMK: Further token ids to compute at each place; None computes no others.
      among_V: Mask of the tokens that the most likely tokens are chosen from; None chooses none.
    """

    order_RM: Array
    place_RW: Array
    target_RM: Array
    chunks: Array
    kept_RMK: Array | None
    named_RMK: Array | None
    among_V: Array | None


def _read_order(
    next_RW: Array, wanted_RW: Array, ids: Sequence[Array | None], among_V: Array | None, chunk: int
) -> _ReadOrder:
    """Return the order in which wanted tokens come first; `ids` are the kept and the named token ids."""
    width = next_RW.shape[1]
    padding = -width % chunk
    order_RM = jnp.pad(jnp.argsort(~wanted_RW, axis=1, stable=True), ((0, 0), (0, padding)))
    place_RW = jnp.argsort(order_RM[:, :width], axis=1)
    target_RM = jnp.take_along_axis(next_RW, order_RM, axis=1)
    chunks = -(-wanted_RW.sum(axis=1).max() // chunk)
    kept, named = (
        None if id_RWK is None else jnp.take_along_axis(id_RWK, order_RM[:, :, None], axis=1) for id_RWK in ids
    )
    return _ReadOrder(order_RM, place_RW, target_RM, chunks, kept, named, among_V)


class _Reading(NamedTuple):
    """Static arguments of `_read`.

    Attributes:
      chunk: Number of tokens of each row in a chunk.
      most: Number of most likely tokens to return.
      vocab: Number of rows of the table that are tokens; the rest are padding.
    """

    chunk: int
    entropy: bool
    most: int
    soft_cap: float | None
    vocab: int
    execution: Execution

    def logits(self, hidden_RCD: Array, table_VD: Array, kept_RMK: Array | None, index: Array) -> Array:
        """Compute the logits of a chunk at temperature 1, `[R, C, V]`; excluded tokens get `_NEVER`."""
        hidden_TD = hidden_RCD.reshape(-1, hidden_RCD.shape[-1])
        logit_TV = jnp.matmul(hidden_TD, table_VD.T, preferred_element_type=jnp.float32)
        logit_RCV = _masked(_cap(logit_TV.reshape(*hidden_RCD.shape[:-1], -1), self.soft_cap), self.vocab, _NEVER)
        return logit_RCV if kept_RMK is None else _among(logit_RCV, _part(kept_RMK, index, self.chunk))


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _read(hidden_RWD: Array, table_VD: Array, scale: Array, order: _ReadOrder, reading: _Reading) -> list[Array]:
    """Compute log-probabilities and the requested further outputs, at the places of `order`."""
    return _read_forward(hidden_RWD, table_VD, scale, order, reading)[0]


def _read_forward(
    hidden_RWD: Array, table_VD: Array, scale: Array, order: _ReadOrder, reading: _Reading
) -> tuple[list[Array], Any]:
    chunk, entropy = reading.chunk, reading.entropy
    hidden_RMD = jnp.take_along_axis(hidden_RWD, order.order_RM[:, :, None], axis=1)
    zeros_RM = jnp.zeros(order.order_RM.shape, jnp.float32)
    start = [zeros_RM] * (2 + entropy)
    if order.named_RMK is not None:
        start.append(jnp.zeros(order.named_RMK.shape, jnp.float32))
    if order.among_V is not None:
        start += [jnp.zeros((*zeros_RM.shape, reading.most), jnp.float32)] * 2

    def body(index: Array, outputs: list[Array]) -> list[Array]:
        logit_RCV = reading.logits(_part(hidden_RMD, index, chunk), table_VD, order.kept_RMK, index) * scale
        # Both sums read the same weights, so an entropy costs no further exponentials.
        peak_RC = logit_RCV.max(axis=-1)
        weight_RCV = jnp.exp(logit_RCV - peak_RC[:, :, None])
        total_RC = weight_RCV.sum(axis=-1)
        normalizer_RC = peak_RC + jnp.log(total_RC)
        # A masked sum, not a gather: it stays local where the vocabulary is sharded.
        target_RCV = _chosen(logit_RCV, _part(order.target_RM, index, chunk))
        chosen_RC = jnp.sum(jnp.where(target_RCV, logit_RCV, 0.0), axis=-1)
        read = [normalizer_RC, chosen_RC - normalizer_RC]
        if entropy:
            # XLA on CPU takes 40 times as long for this sum in three dimensions.
            weighted_TV = (weight_RCV * logit_RCV).reshape(-1, logit_RCV.shape[-1])
            read.append(normalizer_RC - weighted_TV.sum(axis=-1).reshape(total_RC.shape) / total_RC)
        if order.named_RMK is not None:
            named_RCK = _part(order.named_RMK, index, chunk)
            logit_RCK = jnp.take_along_axis(logit_RCV, jnp.maximum(named_RCK, 0), axis=-1)
            read.append(jnp.where(named_RCK < 0, 0.0, logit_RCK - normalizer_RC[:, :, None]))
        if order.among_V is not None:
            padded_V = jnp.pad(order.among_V, (0, logit_RCV.shape[-1] - len(order.among_V)))
            best_RCK, id_RCK = lax.top_k(jnp.where(padded_V, logit_RCV, _NEVER), reading.most)
            read += [best_RCK - normalizer_RC[:, :, None], id_RCK.astype(jnp.float32)]  # ids are exact below 2^24
        return [_put(output, part, index, chunk) for output, part in zip(outputs, read, strict=True)]

    normalizer_RM, *outputs = lax.fori_loop(0, order.chunks, body, start)
    return outputs, (hidden_RWD, table_VD, scale, order, normalizer_RM, outputs)


def _read_backward(reading: _Reading, saved: Any, changes: list[Array]) -> tuple[Array, Array, Array, None]:
    """Compute gradients from probabilities p: d logp = onehot - p, and d entropy = -p (logp + entropy).

    The most likely tokens have no gradient.
    """
    chunk, entropy, soft_cap = reading.chunk, reading.entropy, reading.soft_cap
    hidden_RWD, table_VD, scale, order, normalizer_RM, outputs = saved
    hidden_RMD = jnp.take_along_axis(hidden_RWD, order.order_RM[:, :, None], axis=1)

    def body(index: Array, sums: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        change_RMD, change_DV, change_scale = sums

        def part(array_RM: Array) -> Array:
            return _part(array_RM, index, chunk)[:, :, None]

        hidden_RCD = _part(hidden_RMD, index, chunk)
        capped_RCV = reading.logits(hidden_RCD, table_VD, order.kept_RMK, index)
        logit_RCV = capped_RCV * scale
        logp_RCV = logit_RCV - part(normalizer_RM)
        slope_RC1 = part(changes[0])
        toward_RCV: Array = jnp.where(_chosen(logit_RCV, _part(order.target_RM, index, chunk)), slope_RC1, 0.0)
        if order.named_RMK is not None:
            named_RCK, slope_RCK = (_part(each, index, chunk) for each in (order.named_RMK, changes[-1]))
            slope_RCK = jnp.where(named_RCK < 0, 0.0, slope_RCK)
            toward_RCV = _add_at(toward_RCV, named_RCK, slope_RCK)
            slope_RC1 = slope_RC1 + jnp.sum(slope_RCK, axis=-1, keepdims=True)
        if entropy:
            slope_RC1 = slope_RC1 + part(changes[1]) * (logp_RCV + part(outputs[1]))
        change_RCV = toward_RCV - jnp.exp(logp_RCV) * slope_RC1
        change_scale += jnp.sum(change_RCV * logit_RCV) / scale
        if soft_cap is not None:
            change_RCV *= 1 - jnp.square(capped_RCV / soft_cap)
        change_TV = (change_RCV * scale).astype(table_VD.dtype).reshape(-1, table_VD.shape[0])
        change_RCD = jnp.matmul(change_TV, table_VD).reshape(hidden_RCD.shape)
        change_DV += transposed_product(hidden_RCD.reshape(change_TV.shape[0], -1), change_TV, jnp.float32)
        return _put(change_RMD, change_RCD, index, chunk), change_DV, change_scale

    start = (
        reading.execution.split_rows(jnp.zeros_like(hidden_RMD)),
        jnp.zeros(table_VD.shape[::-1], jnp.float32),
        jnp.zeros((), jnp.float32),
    )
    change_RMD, change_DV, change_scale = lax.fori_loop(0, order.chunks, body, start)
    change_RWD = jnp.take_along_axis(change_RMD, order.place_RW[:, :, None], axis=1)
    return change_RWD, change_DV.T.astype(table_VD.dtype), change_scale, None


_read.defvjp(_read_forward, _read_backward)


def _scaled(hidden_D: Array, config: AnyModel) -> Array:
    """Divide hidden states by `logits_scaling`, so that logits come out divided."""
    return hidden_D if config.logits_scaling == 1.0 else hidden_D / config.logits_scaling


def _cap(logit_V: Array, soft_cap: float | None) -> Array:
    return logit_V if soft_cap is None else soft_cap * jnp.tanh(logit_V / soft_cap)


def _masked(logit_V: Array, vocab: int, never: float) -> Array:
    """Set logits past the vocabulary to `never`."""
    rows = logit_V.shape[-1]
    if rows == vocab:
        return logit_V
    token_V = jnp.arange(rows).reshape((1,) * (logit_V.ndim - 1) + (rows,))
    return jnp.where(token_V < vocab, logit_V, never)


def _among(logit_RCV: Array, kept_RCK: Array) -> Array:
    """Set the logits of tokens outside the kept ids to `_NEVER`; keep all logits if every id is negative."""
    vocab = logit_RCV.shape[-1]

    def kept_of(kept_K: Array) -> Array:
        # Negative ids are moved past the vocabulary and dropped: a negative index would count from the end.
        named_V = jnp.zeros(vocab, bool).at[jnp.where(kept_K < 0, vocab, kept_K)].set(True, mode="drop")
        return named_V | (kept_K < 0).all()

    return jnp.where(jax.vmap(jax.vmap(kept_of))(kept_RCK), logit_RCV, _NEVER)


def _chosen(logit_RCV: Array, target_RC: Array) -> Bool[Array, "R C V"]:
    return jnp.arange(logit_RCV.shape[-1])[None, None, :] == target_RC[:, :, None]


def _add_at(array_RCV: Array, id_RCK: Array, value_RCK: Array) -> Array:
    """Add values at ids of the last dimension. Values of negative ids must be 0."""
    added = jax.vmap(jax.vmap(lambda own_V, id_K, value_K: own_V.at[jnp.maximum(id_K, 0)].add(value_K)))
    return added(array_RCV, id_RCK, value_RCK)


def _part(array_RM: Array, index: Array, chunk: int) -> Array:
    return lax.dynamic_slice_in_dim(array_RM, index * chunk, chunk, axis=1)


def _put(array_RM: Array, part_RC: Array, index: Array, chunk: int) -> Array:
    return lax.dynamic_update_slice_in_dim(array_RM, part_RC, index * chunk, axis=1)


def values(params: Params, hidden_RWD: Float[Array, "R W D"]) -> Float32[Array, "R W"]:
    """Compute values by the value head: `value[r, t]` is the value of the prefix before token t; column 0 is 0."""
    return _shift(token_scores(params, hidden_RWD))


def score(
    params: Params,
    hidden_RWD: Float[Array, "R W D"],
    row_B: Int[Array, "B"],
    last_B: Int[Array, "B"],
) -> Float32[Array, "B"]:
    """Compute scores by the score head at the last token of each sequence.

    Args:
      row_B: Row that contains the sequence.
      last_B: Index of the sequence's last token in its row.
    """
    return token_scores(params, hidden_RWD[row_B, last_B])


def token_scores(params: Params, hidden_D: Float[Array, "*batch D"]) -> Float32[Array, "*batch"]:
    """Compute scores by the score head, or values by the value head, at every token."""
    return jnp.einsum("...D,D->...", hidden_D.astype(jnp.float32), params["head"].astype(jnp.float32))


def _shift(predicted_RW: Array) -> Array:
    """Move predictions from the index of the predicting token to the index of the predicted token."""
    return jnp.pad(predicted_RW[:, :-1], ((0, 0), (1, 0), *[(0, 0)] * (predicted_RW.ndim - 2)))
