"""Token sampling inside the compiled program: one token for every slot.

The sampling settings of the slots are arrays, so a change of temperature never recompiles. A sampled token is a
function of (seed, request, position) and of the slot's own logits only: the same request gives the same tokens in any
slot, in any batch, in any order.

The reported log-probability of a token is the policy's at the slot's temperature, before top-k, top-p, min-p,
`min_tokens`, a constraint or greedy decoding narrow the choice:

    logp = log_softmax(logits / temperature)[token]

A trainer that knows the temperature and nothing else therefore computes the same number.

If the sampling mask of a slot is recorded (`most_kept`), the log-probability is renormalized over the kept tokens:

    logp = logits[token] / temperature - logsumexp(logits[kept] / temperature)

A trainer with the recorded mask computes the same number, and its policy ratios are over the same tokens.

Source: DeepSeek-V3.2 (arXiv:2512.02556), section 3.1, "keep sampling mask".
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Bool, Float, Int, UInt32

from jaxrlhf import config
from jaxrlhf.batch import Array

_DIGIT = 4
"""Number of bits of a threshold that one round of the search determines."""


class SlotSampling(NamedTuple):
    """Sampling settings of each slot; see `config.Sampling`.

    Attributes:
      temperature_B: float32, above 0.
      top_p_B: float32 in (0, 1]; 1 keeps all.
      top_k_B: int32; 0 keeps all.
      min_p_B: float32 in [0, 1); 0 keeps all.
      min_tokens_B: int32; stop tokens are not sampled at earlier positions, greedy or not.
      greedy_B: bool; True takes the likeliest token.
    """

    temperature_B: Array
    top_p_B: Array
    top_k_B: Array
    min_p_B: Array
    min_tokens_B: Array
    greedy_B: Array


class Sampled(NamedTuple):
    """Sampled token of each slot, and its log-probability at the slot's temperature.

    Attributes:
      kept_BK: Sampling mask: ids of the tokens that the slot could sample, padded with -1; all -1 for a slot that
        records no mask, None if no slot records a mask.
    """

    token_B: Int[Array, "B"]
    logp_B: Float[Array, "B"]
    kept_BK: Int[Array, "B K"] | None = None


def settings_of(samplings: Sequence[config.Sampling]) -> SlotSampling:
    """Return the sampling settings of each slot as host arrays."""
    return SlotSampling(
        temperature_B=np.array([sampling.temperature for sampling in samplings], np.float32),
        top_p_B=np.array([sampling.top_p for sampling in samplings], np.float32),
        top_k_B=np.array([sampling.top_k for sampling in samplings], np.int32),
        min_p_B=np.array([sampling.min_p for sampling in samplings], np.float32),
        min_tokens_B=np.array([sampling.min_tokens for sampling in samplings], np.int32),
        greedy_B=np.array([sampling.greedy for sampling in samplings], bool),
    )


def uniforms(
    seed_B: UInt32[Array, "B"], request_B: UInt32[Array, "B"], position_B: Int[Array, "B"]
) -> Float[Array, "B 2"]:
    """Return two uniform random numbers in [0, 1) per slot, a function of (seed, request, position) alone."""

    def of_slot(seed, request, position):
        # The generator is explicit: samples of another default (`jax_default_prng_impl`) may depend on the batch.
        key = jax.random.key(seed, impl="threefry2x32")
        return jax.random.uniform(jax.random.fold_in(jax.random.fold_in(key, request), position), (2,))

    return jax.vmap(of_slot)(seed_B, request_B, position_B)


def sample(
    logits_BV: Float[Array, "B V"],
    uniform_B2: Float[Array, "B 2"],
    position_B: Int[Array, "B"],
    settings: SlotSampling,
    *,
    stop_BE: Int[Array, "B E"],
    bits_BU: UInt32[Array, "B U"] | None = None,
    most_kept: int = 0,
) -> Sampled:
    """Sample a token of each slot by inverting the cumulative distribution.

    The vocabulary is split into chunks of about sqrt(V): the first uniform number selects a chunk by its mass, the
    second selects a token of the chunk. This costs two short cumulative sums instead of a random number per entry, and
    keeps the rounding of a float32 sum of V terms out of the tail.

    Args:
      logits_BV: Logits; a token with -inf is never sampled. At least one entry of a row is finite.
      position_B: Number of response tokens that were sampled before this one.
      stop_BE: Stop token ids that `min_tokens` suppresses; negative entries are padding.
      bits_BU: Tokens that a `TokenConstraint` allows; None allows all.
      most_kept: K; slots whose `top_k_B` is from 1 to K record their sampling mask. 0 records none.
    """
    scaled_BV = logits_BV.astype(jnp.float32) * (1.0 / settings.temperature_B)[:, None]
    peak_B1 = scaled_BV.max(axis=-1, keepdims=True)
    weight_BV = jnp.exp(scaled_BV - peak_B1)
    normaliser_B = peak_B1[:, 0] + jnp.log(weight_BV.sum(axis=-1))

    early_B = position_B < settings.min_tokens_B
    recorded_B = ~settings.greedy_B & (settings.top_k_B > 0) & (settings.top_k_B <= most_kept)
    restricted_B = ~recorded_B & (early_B | settings.greedy_B | _truncates(settings) | (bits_BU is not None))
    possible_BV = scaled_BV if bits_BU is None else jnp.where(_unpacked(bits_BU, scaled_BV), scaled_BV, -jnp.inf)
    # With uniform 0 the inversion takes the first of a greedy slot's remaining tokens.
    uniform_B2 = jnp.where(settings.greedy_B[:, None], 0.0, uniform_B2)
    # Whole branches, because an array that a branch returns is copied.
    token_B = lax.cond(
        restricted_B.any(),
        lambda: _sample_token(_restricted_weights(possible_BV, early_B, stop_BE, settings), uniform_B2),
        lambda: _sample_token(weight_BV, uniform_B2),
    )
    chosen_B = jnp.take_along_axis(scaled_BV, token_B[:, None], axis=-1)[:, 0]
    sampled = Sampled(token_B, chosen_B - normaliser_B)
    if not most_kept:
        return sampled
    possible_BV = _allowed(possible_BV, early_B, stop_BE)
    token_B, logp_B, kept_BK = _sample_among_kept(possible_BV, uniform_B2[:, 0], settings, most_kept=most_kept)
    return Sampled(
        jnp.where(recorded_B, token_B, sampled.token_B),
        jnp.where(recorded_B, logp_B, sampled.logp_B),
        jnp.where(recorded_B[:, None], kept_BK, -1),
    )


def _unpacked(bits_BU: UInt32[Array, "B U"], like_BV: Float[Array, "B V"]) -> Bool[Array, "B V"]:
    """Return the bits as a mask of the vocabulary; False for padding of the vocabulary."""
    bit_BU32 = (bits_BU[:, :, None] >> jnp.arange(32, dtype=jnp.uint32)[None, None]) & 1
    bit_BV = bit_BU32.reshape(len(bits_BU), -1)[:, : like_BV.shape[1]].astype(bool)
    return jnp.pad(bit_BV, ((0, 0), (0, like_BV.shape[1] - bit_BV.shape[1])))


def _truncates(settings: SlotSampling) -> Bool[Array, "B"]:
    return (settings.top_k_B > 0) | (settings.top_p_B < 1) | (settings.min_p_B > 0)


def _sample_among_kept(
    allowed_BV: Float[Array, "B V"], uniform_B: Float[Array, "B"], settings: SlotSampling, *, most_kept: int
) -> tuple[Int[Array, "B"], Float[Array, "B"], Int[Array, "B K"]]:
    """Sample among at most the `most_kept` likeliest tokens, narrowed further by the settings; see `Sampled`.

    If tokens tie for the last place, the lowest ids are kept, so there are never more than `top_k` tokens.
    """
    most = min(most_kept, allowed_BV.shape[-1])
    logit_BK, token_BK = lax.top_k(allowed_BV, most)
    kept_BK = (jnp.arange(most)[None] < settings.top_k_B[:, None]) & jnp.isfinite(logit_BK)
    weight_BK = jnp.where(kept_BK, jnp.exp(logit_BK - logit_BK[:, :1]), 0.0)
    before_BK = jnp.cumsum(weight_BK, axis=-1) - weight_BK
    wanted_B = jnp.where(settings.top_p_B < 1, settings.top_p_B * weight_BK.sum(axis=-1), jnp.inf)
    kept_BK &= (before_BK < wanted_B[:, None]) & (weight_BK >= settings.min_p_B[:, None])
    weight_BK = jnp.where(kept_BK, weight_BK, 0.0)
    place_B1 = _invert(weight_BK, uniform_B)[:, None]
    token_B, chosen_B = (jnp.take_along_axis(each, place_B1, axis=-1)[:, 0] for each in (token_BK, logit_BK))
    kept_BK = jnp.where(kept_BK, token_BK, -1)
    missing = most_kept - most
    logp_B = chosen_B - logit_BK[:, 0] - jnp.log(weight_BK.sum(axis=-1))
    return token_B, logp_B, jnp.pad(kept_BK, ((0, 0), (0, missing)), constant_values=-1)


def _sample_token(weight_BV: Float[Array, "B V"], uniform_B2: Float[Array, "B 2"]) -> Int[Array, "B"]:
    """Sample a token of each slot from unnormalized probabilities."""
    batch, vocab = weight_BV.shape
    width = _chunk_width(vocab)
    weight_BCW = weight_BV.reshape(batch, vocab // width, width)
    chunk_B = _invert(weight_BCW.sum(axis=-1), uniform_B2[:, 0])
    weight_BW = jnp.take_along_axis(weight_BCW, chunk_B[:, None, None], axis=1)[:, 0]
    return chunk_B * width + _invert(weight_BW, uniform_B2[:, 1])


def _restricted_weights(
    scaled_BV: Float[Array, "B V"], early_B: Bool[Array, "B"], stop_BE: Int[Array, "B E"], settings: SlotSampling
) -> Float[Array, "B V"]:
    """Return the unnormalized probabilities of the tokens that a slot may sample, 0 elsewhere."""
    allowed_BV = _allowed(scaled_BV, early_B, stop_BE)
    peak_B1 = allowed_BV.max(axis=-1, keepdims=True)
    truncated_B = ~settings.greedy_B & _truncates(settings)
    threshold_B1 = lax.cond(
        truncated_B.any(),
        lambda: _threshold(allowed_BV, settings),
        lambda: jnp.full_like(peak_B1, -jnp.inf),
    )
    threshold_B1 = jnp.where(settings.greedy_B[:, None], peak_B1, threshold_B1)
    return jnp.where(allowed_BV >= threshold_B1, jnp.exp(allowed_BV - peak_B1), 0.0)


def _allowed(
    scaled_BV: Float[Array, "B V"], early_B: Bool[Array, "B"], stop_BE: Int[Array, "B E"]
) -> Float[Array, "B V"]:
    """Return the logits with -inf for the stop tokens that `min_tokens` suppresses."""
    held_back_BE = jnp.where(early_B[:, None], stop_BE, -1)
    stop_BV = (jnp.arange(scaled_BV.shape[-1])[None, :, None] == held_back_BE[:, None, :]).any(axis=-1)
    return jnp.where(stop_BV, -jnp.inf, scaled_BV)


def _threshold(scaled_BV: Float[Array, "B V"], settings: SlotSampling) -> Float[Array, "B 1"]:
    """Return the smallest logit that is kept after top-k, then top-p, then min-p.

    Top-p keeps the fewest of the top-k tokens that hold a mass of `top_p`. Tokens that tie with the last kept token are
    kept too. The threshold is found by a search with sums: sorting would make devices that split the vocabulary gather
    all logits.

    Source: Holtzman et al. 2020 (arXiv:1904.09751), section 3.1, for top_p; Nguyen et al. 2024 (arXiv:2407.01082) for
    min_p.
    """
    vocab = scaled_BV.shape[-1]
    order_BV = _ordered_bits(scaled_BV)
    wanted_B = jnp.where(settings.top_k_B > 0, settings.top_k_B, vocab).astype(jnp.float32)
    last_B = _last_that_reaches(order_BV, jnp.ones_like(scaled_BV), wanted_B)
    weight_BV = jnp.exp(scaled_BV - scaled_BV.max(axis=-1, keepdims=True))
    weight_BV = jnp.where(order_BV >= last_B[:, None], weight_BV, 0.0)
    nucleus_B = _last_that_reaches(order_BV, weight_BV, settings.top_p_B * weight_BV.sum(axis=-1))
    # Rounding may leave a sum below the whole mass, so top_p = 1 is not compared; it keeps all tokens.
    last_B = jnp.where(settings.top_p_B == 1, last_B, jnp.maximum(last_B, nucleus_B))
    smallest_B1 = jnp.where(order_BV >= last_B[:, None], scaled_BV, jnp.inf).min(axis=-1, keepdims=True)
    peak_B1 = scaled_BV.max(axis=-1, keepdims=True)
    return jnp.maximum(smallest_B1, peak_B1 + jnp.log(settings.min_p_B)[:, None])


def _ordered_bits(x: Float[Array, "B V"]) -> UInt32[Array, "B V"]:
    """Map float32 numbers to unsigned integers that compare in the same order."""
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))


def _last_that_reaches(
    order_BV: UInt32[Array, "B V"], weight_BV: Float[Array, "B V"], target_B: Float[Array, "B"]
) -> UInt32[Array, "B"]:
    """Return the largest threshold at or above which the weights sum to the target; 0 if all weights sum to less.

    The search finds four bits at a time: eight rounds of fifteen sums.
    """
    digit_S = jnp.arange(1, 1 << _DIGIT, dtype=jnp.uint32)

    def narrow(round_: Int[Array, ""], found_B: UInt32[Array, "B"]) -> UInt32[Array, "B"]:
        shift = (32 - _DIGIT * (round_ + 1)).astype(jnp.uint32)
        threshold_BS = found_B[:, None] | (digit_S << shift)[None, :]
        above_BSV = order_BV[:, None, :] >= threshold_BS[:, :, None]
        mass_BS = jnp.where(above_BSV, weight_BV[:, None, :], 0.0).sum(axis=-1)
        reached_B = (mass_BS >= target_B[:, None]).sum(axis=-1, dtype=jnp.uint32)
        return found_B | (reached_B << shift)

    return lax.fori_loop(0, 32 // _DIGIT, narrow, jnp.zeros_like(target_B, jnp.uint32))


def _invert(weight_BN: Float[Array, "B N"], uniform_B: Float[Array, "B"]) -> Int[Array, "B"]:
    """Return the first entry whose cumulative weight exceeds `uniform` times the total; never an entry of weight 0."""
    entries = weight_BN.shape[-1]
    total_BN = jnp.cumsum(weight_BN, axis=-1)
    # A parallel sum is not exactly monotone. So entries of weight 0 are excluded explicitly, and the target is a
    # fraction of the largest sum among the other entries, so that at least one entry exceeds it.
    possible_BN = weight_BN > 0
    target_B = uniform_B * jnp.where(possible_BN, total_BN, 0.0).max(axis=-1)
    beyond_BN = possible_BN & (total_BN > target_B[:, None])
    return jnp.where(beyond_BN, jnp.arange(entries)[None, :], entries - 1).min(axis=-1)


def _chunk_width(vocab: int) -> int:
    """Return the divisor of the vocabulary size for which the sums over chunks and within a chunk are shortest.

    Up to 64 devices that split a large vocabulary hold whole chunks: a split chunk would make all devices gather the
    logits. For a small vocabulary that gather costs nothing.
    """
    each = vocab // math.gcd(vocab, 64) if vocab >= 64**2 else vocab
    widths = [width for width in range(1, each + 1) if each % width == 0]
    return min(widths, key=lambda width: width + vocab // width)
