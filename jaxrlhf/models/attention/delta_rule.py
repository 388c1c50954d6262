"""Gated delta rule: linear attention in which each head keeps one state matrix for all previous tokens.

    S_t = a_t S_{t-1} + b_t k_t (v_t - k_t^T a_t S_{t-1})^T        out_t = S_t^T q_t

with unit keys k, a decay a in (0, 1) and a rate b in (0, 1). A selective state space has no correction term:

    S_t = a_t S_{t-1} + b_t k_t v_t^T                              out_t = S_t^T q_t

Rows are computed a chunk of tokens at a time, by matrix products. A decoded token is computed by the formula above.
All computation is float32.

Source: Yang et al. 2024 (Gated Delta Networks, arXiv:2412.06464), section 3; in chunks: Yang et al. 2024
(DeltaNet, arXiv:2406.06484), section 3.2; state spaces: Dao and Gu 2024 (Mamba-2, arXiv:2405.21060), section 6.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Float, Float32, Int

from jaxrlhf.batch import Array

CHUNK = 64
"""Number of tokens of a chunk."""

_EPS = 1e-6
"""Number added under the root of a key's or query's length."""


class Steps(NamedTuple):
    """State updates of tokens, with G value heads for each of K key heads.

    Attributes:
      query_RWKX: Unit queries divided by the root of their width; not normalized in a state space.
      key_RWKX: Unit keys; not normalized in a state space.
      value_RWKGU: Values.
      decay_RWKG: Logarithm of the decay.
      rate_RWKG: Rate of the update.
    """

    query_RWKX: Array
    key_RWKX: Array
    value_RWKGU: Array
    decay_RWKG: Array
    rate_RWKG: Array


def unit(head_X: Float[Array, "*batch X"]) -> Float32[Array, "*batch X"]:
    """Normalize heads to length one."""
    wide_X = head_X.astype(jnp.float32)
    return wide_X * lax.rsqrt(jnp.square(wide_X).sum(axis=-1, keepdims=True) + _EPS)


def one_step(state_RKGXU: Float32[Array, "R K G X U"], steps: Steps, *, corrects: bool = True) -> tuple[Array, Array]:
    """Compute one token of every row, `W = 1`.

    Args:
      corrects: True is the delta rule, False is a state space.

    Returns:
      Mixed values, `[R, 1, K, G, U]`, and the states.
    """
    query_RKX, key_RKX, value_RKGU, decay_RKG, rate_RKG = (leaf[:, 0].astype(jnp.float32) for leaf in steps)
    state_RKGXU = state_RKGXU * jnp.exp(decay_RKG)[..., None, None]
    change_RKGU = value_RKGU
    if corrects:
        change_RKGU -= jnp.einsum("RKGXU,RKX->RKGU", state_RKGXU, key_RKX)
    change_RKGU *= rate_RKG[..., None]
    state_RKGXU = state_RKGXU + jnp.einsum("RKX,RKGU->RKGXU", key_RKX, change_RKGU)
    return jnp.einsum("RKGXU,RKX->RKGU", state_RKGXU, query_RKX)[:, None], state_RKGXU


def in_chunks(
    steps: Steps,
    segment_RW: Int[Array, "R W"],
    state_RKGXU: Float32[Array, "R K G X U"] | None = None,
    *,
    corrects: bool = True,
) -> tuple[Float32[Array, "R W K G U"], Float32[Array, "R K G X U"]]:
    """Compute all tokens of packed rows; each segment starts from a zero state.

    Args:
      state_RKGXU: States that each row's first segment continues from; None is zeros.
      corrects: True is the delta rule, False is a state space.

    Returns:
      Mixed values, and the states after the last segment.
    """
    rows, width, heads, group = steps.decay_RWKG.shape
    sizes = steps.query_RWKX.shape[-1], steps.value_RWKGU.shape[-1]
    padding = -width % CHUNK

    def chunked(leaf_RW: Array) -> Array:
        """Split into chunks `[N, R, C, ...]`. Padding at the end neither decays nor changes a state."""
        more = [(0, 0), (0, padding), *[(0, 0)] * (leaf_RW.ndim - 2)]
        padded = jnp.pad(leaf_RW, more, mode="edge") if leaf_RW.ndim == 2 else jnp.pad(leaf_RW, more)
        return jnp.moveaxis(padded.reshape(rows, -1, CHUNK, *leaf_RW.shape[2:]), 1, 0)

    if state_RKGXU is None:
        # Made from the rows, so that it varies over devices of a manual mesh axis as the rows do.
        zero_RKG = jnp.where(False, steps.decay_RWKG[:, 0], 0.0).astype(jnp.float32)
        state_RKGXU = jnp.broadcast_to(zero_RKG[..., None, None], (rows, heads, group, *sizes))
    start_state = state_RKGXU, segment_RW[:, 0]
    chunks = jax.tree.map(chunked, steps), chunked(segment_RW)
    chunk = jax.checkpoint(partial(_chunk, corrects=corrects), prevent_cse=False)
    (last_RKGXU, _), mixed_NRCKGU = lax.scan(chunk, start_state, chunks)
    mixed_RWKGU = jnp.moveaxis(mixed_NRCKGU, 0, 1).reshape(rows, -1, heads, group, sizes[1])
    return mixed_RWKGU[:, :width], last_RKGXU


def _chunk(
    carry: tuple[Array, Array], chunk: tuple[Steps, Array], *, corrects: bool
) -> tuple[tuple[Array, Array], Array]:
    """Compute a chunk of every row. The carry is the states before the chunk, and the segment of each state.

    D_ij is the decay from token j to token i; it is 0 if i comes before j or is in another segment. The changes u of
    all tokens solve

        u_i + b_i sum_{j<i} D_ij (k_i . k_j) u_j = b_i (v_i - a_1 ... a_i k_i^T S)

    in the delta rule, and are u_i = b_i v_i in a state space.
    """
    (state_RKGXU, of_R), (steps, segment_RC) = carry, chunk
    query_RKCX, key_RKCX = (jnp.moveaxis(leaf.astype(jnp.float32), 2, 1) for leaf in steps[:2])
    value_RKGCU, decay_RKGC, rate_RKGC = (jnp.moveaxis(leaf.astype(jnp.float32), 1, 3) for leaf in steps[2:])
    sum_RKGC = jnp.cumsum(decay_RKGC, axis=-1)
    same_RCC = segment_RC[:, :, None] == segment_RC[:, None, :]
    place_C = jnp.arange(segment_RC.shape[1])
    seen_RCC = (same_RCC & (place_C[:, None] >= place_C[None, :])[None])[:, None, None]
    # Zeros in masked places; otherwise their gradient would be infinity times zero.
    between_RKGCC = sum_RKGC[..., :, None] - sum_RKGC[..., None, :]
    if not corrects:  # decays are so strong that the difference of two sums has few digits left
        later_CC = place_C[:, None] > place_C[None, :]
        between_RKGCC = jnp.cumsum(jnp.where(later_CC, decay_RKGC[..., :, None], 0.0), axis=-2)
    between_RKGCC = jnp.where(seen_RCC, between_RKGCC, 0.0)
    decayed_RKGCC = jnp.where(seen_RCC, jnp.exp(between_RKGCC), 0.0)
    before_RKGC = jnp.where((segment_RC == of_R[:, None])[:, None, None], jnp.exp(sum_RKGC), 0.0)

    change_RKGCU = rate_RKGC[..., None] * value_RKGCU
    if corrects:
        known_RKGCU = jnp.einsum("RKCX,RKGXU->RKGCU", key_RKCX, state_RKGXU) * before_RKGC[..., None]
        overlap_RKCC = jnp.einsum("RKCX,RKDX->RKCD", key_RKCX, key_RKCX)
        system_RKGCC = rate_RKGC[..., None] * decayed_RKGCC * overlap_RKCC[:, :, None]
        wanted_RKGCU = rate_RKGC[..., None] * (value_RKGCU - known_RKGCU)
        change_RKGCU = jnp.einsum("RKGCD,RKGDU->RKGCU", _inverse(jnp.tril(system_RKGCC, -1)), wanted_RKGCU)

    mixed_RKGCU = jnp.einsum("RKCX,RKGXU->RKGCU", query_RKCX, state_RKGXU) * before_RKGC[..., None]
    score_RKGCC = jnp.einsum("RKCX,RKDX->RKCD", query_RKCX, key_RKCX)[:, :, None] * decayed_RKGCC
    mixed_RKGCU += jnp.einsum("RKGCD,RKGDU->RKGCU", score_RKGCC, change_RKGCU)
    state_RKGXU = state_RKGXU * before_RKGC[..., -1, None, None]
    state_RKGXU += jnp.einsum("RKCX,RKGC,RKGCU->RKGXU", key_RKCX, decayed_RKGCC[..., -1, :], change_RKGCU)
    return (state_RKGXU, segment_RC[:, -1]), jnp.moveaxis(mixed_RKGCU, 3, 1)


@jax.custom_vjp
def _inverse(below_CC: Array) -> Array:
    """Invert the identity plus a matrix that is zero on and above its diagonal, by halves:

    [[P, 0], [B, Q]]^-1 = [[P^-1, 0], [-Q^-1 B P^-1, Q^-1]]

    Only products are used, which the compiler splits over devices. The result is as exact as substitution.
    """
    size = below_CC.shape[-1]
    if size == 1:
        return jnp.ones_like(below_CC)
    half = size // 2
    both = jnp.stack([below_CC[..., :half, :half], below_CC[..., half:, half:]])
    first, last = _inverse(both)
    corner = -last @ below_CC[..., half:, :half] @ first
    above = jnp.concatenate([first, jnp.zeros_like(first)], axis=-1)
    return jnp.concatenate([above, jnp.concatenate([corner, last], axis=-1)], axis=-2)


def _inverse_forward(below_CC: Array) -> tuple[Array, Array]:
    inverse_CC = _inverse(below_CC)
    return inverse_CC, inverse_CC


def _inverse_backward(inverse_CC: Array, change_CC: Array) -> tuple[Array]:
    turned_CC = jnp.swapaxes(inverse_CC, -1, -2)
    return (jnp.tril(-(turned_CC @ change_CC @ turned_CC), -1),)


_inverse.defvjp(_inverse_forward, _inverse_backward)


@partial(jax.checkpoint, static_argnums=())
def convolve(
    input_RWKY: Float[Array, "R W K Y"],
    weight_KYT: Float[Array, "K Y T"],
    segment_RW: Int[Array, "R W"],
    before_RSKY: Float[Array, "R S K Y"] | None = None,
    bias_KY: Float[Array, "K Y"] | None = None,
) -> Float[Array, "R W K Y"]:
    """Compute silu of the causal convolution of every channel, over the T newest tokens of the segment.

    Args:
      before_RSKY: Inputs of the T - 1 tokens before the row, in the segment of its first token; None is zeros.
      bias_KY: Bias of each channel.
    """
    width, taps = input_RWKY.shape[1], weight_KYT.shape[-1]
    if before_RSKY is None:
        before_RSKY = jnp.zeros((len(input_RWKY), taps - 1, *input_RWKY.shape[2:]), input_RWKY.dtype)
    whole_RVKY = jnp.concatenate([before_RSKY.astype(input_RWKY.dtype), input_RWKY], axis=1)
    of_RV = jnp.pad(segment_RW, ((0, 0), (taps - 1, 0)), mode="edge")
    total = jnp.zeros(input_RWKY.shape, jnp.float32)
    for tap in range(taps):
        there_RWKY = whole_RVKY[:, tap : tap + width].astype(jnp.float32)
        same_RW = of_RV[:, tap : tap + width] == segment_RW
        total += jnp.where(
            same_RW[:, :, None, None], there_RWKY * weight_KYT[None, None, :, :, tap].astype(jnp.float32), 0.0
        )
    if bias_KY is not None:
        total += bias_KY.astype(jnp.float32)[None, None]
    return jax.nn.silu(total).astype(input_RWKY.dtype)


def convolve_one(
    input_B1KY: Float[Array, "B 1 K Y"],
    weight_KYT: Float[Array, "K Y T"],
    before_BSKY: Float[Array, "B S K Y"],
    bias_KY: Float[Array, "K Y"] | None = None,
) -> Float[Array, "B 1 K Y"]:
    """Compute the convolution of one token of every slot and the T - 1 tokens before it, summed in the order of rows.

    Arrays are not concatenated: XLA for GPUs does not compile a norm of a slice of concatenated arrays.
    """
    *taps_11KY, newest_11KY = jnp.moveaxis(weight_KYT.astype(jnp.float32)[None, None], -1, 0)
    total = jnp.zeros(input_B1KY.shape, jnp.float32)
    for tap, weight_11KY in enumerate(taps_11KY):
        total += before_BSKY[:, tap : tap + 1].astype(input_B1KY.dtype).astype(jnp.float32) * weight_11KY
    total += input_B1KY.astype(jnp.float32) * newest_11KY
    if bias_KY is not None:
        total += bias_KY.astype(jnp.float32)[None, None]
    return jax.nn.silu(total).astype(input_B1KY.dtype)
