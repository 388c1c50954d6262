"""Importance sampling correction for different log-probabilities of sampler and trainer."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Bool, Float

from jaxrlhf.algos.kl import LOG_RATIO_LIMIT, kl_estimate
from jaxrlhf.algos.masked import masked_mean, masked_sum, selected
from jaxrlhf.batch import Array
from jaxrlhf.config import IcePop, Rejection, TruncatedImportance


class ImportanceWeights(NamedTuple):
    """Importance weights of sampled tokens.

    Attributes:
      weight_BT: Factor for token weights; constant for the gradient, 0 for rejected tokens and outside the mask.
      metrics: Scalars by name: mean and largest weight, effective fraction of the tokens, and fractions of rejected
        tokens, of rejected responses and of tokens with a capped weight.
    """

    weight_BT: Float[Array, "B T"]
    metrics: dict[str, Float[Array, ""]]


@partial(jax.jit, static_argnames=("importance", "rejection"))
def rollout_correction(
    old_logp_BT: Float[Array, "B T"],
    sampler_logp_BT: Float[Array, "B T"],
    mask_BT: Bool[Array, "B T"],
    *,
    importance: TruncatedImportance | IcePop | None,
    rejection: tuple[Rejection, ...] = (),
) -> ImportanceWeights:
    """Compute importance weights of the sampler's tokens. With r_t = clip(old_logp - sampler_logp, -20, 20):

        truncated, token      w_t = min(exp(r_t), cap)
        truncated, sequence   w_t = min(exp(clip(sum_t r_t, -20, 20)), cap)
        IcePop                w_t = exp(r_t) where low <= exp(r_t) <= high, else 0
        None                  w_t = 1

    and w_t = 0 if any rejection applies (see `Rejection`). The effective fraction is `mean(w)^2 / mean(w^2)`.

    Args:
      old_logp_BT: Trainer's log-probabilities at the start of the update.
      sampler_logp_BT: Log-probabilities that the sampler reported.
      importance: Kind of weights.
      rejection: Rejection bands; a token outside any of them is rejected.

    Source: truncation: Ionides 2008 (Truncated importance sampling); per token for language models: Yao et al. 2025
    (Your efficient RL framework secretly brings you off-policy RL training); per sequence, and rejection: Liu et al.
    2025 (When speed kills stability: demystifying RL collapse from the training-inference mismatch); IcePop: Ling Team
    2025 (Every step evolves, arXiv:2510.18855).
    """
    log_ratio_BT = _log_ratio(old_logp_BT, sampler_logp_BT, mask_BT)
    ratio_BT, kept_BT = jnp.exp(log_ratio_BT), mask_BT
    match importance:
        case TruncatedImportance(level="sequence"):
            total_B1 = log_ratio_BT.sum(axis=1, keepdims=True)
            ratio_BT = jnp.broadcast_to(jnp.exp(_bounded(total_B1)), mask_BT.shape)
        case IcePop(low, high):
            kept_BT = kept_BT & (low <= ratio_BT) & (ratio_BT <= high)
        case None:
            ratio_BT = jnp.ones_like(ratio_BT)
    for each in rejection:
        kept_BT = kept_BT & _kept(log_ratio_BT, mask_BT, each)
    cap = importance.cap if isinstance(importance, TruncatedImportance) else jnp.inf
    weight_BT = lax.stop_gradient(selected(jnp.minimum(ratio_BT, cap), kept_BT))
    response_B = jnp.any(mask_BT, axis=1)
    return ImportanceWeights(
        weight_BT,
        {
            "correction/weight_mean": masked_mean(weight_BT, mask_BT),
            "correction/weight_max": weight_BT.max(),
            "correction/effective_fraction": _effective_fraction(weight_BT, mask_BT),
            "correction/capped_fraction": masked_mean((ratio_BT > cap).astype(ratio_BT.dtype), mask_BT),
            "correction/rejected_tokens": masked_mean((~kept_BT).astype(ratio_BT.dtype), mask_BT),
            "correction/rejected_responses": masked_mean((~kept_BT.any(axis=1)).astype(ratio_BT.dtype), response_B),
        },
    )


def _kept(log_ratio_BT: Array, mask_BT: Array, rejection: Rejection) -> Array:
    """Return True where the estimate is in the rejection's band; `[B, T]`, or `[B, 1]` for whole responses."""
    low, high = -rejection.high if rejection.low is None else rejection.low, rejection.high
    match rejection.estimator:
        case "k1":
            estimate_BT = -log_ratio_BT
        case "k2":
            estimate_BT = jnp.square(log_ratio_BT) / 2
        case "k3":
            estimate_BT = jnp.expm1(log_ratio_BT) - log_ratio_BT
    match rejection.level:
        case "sequence-mean":
            estimate_BT = masked_mean(estimate_BT, mask_BT, axis=1)[:, None]
        case "sequence-sum":
            estimate_BT = masked_sum(estimate_BT, mask_BT, axis=1)[:, None]
    inside_BT = (low <= estimate_BT) & (estimate_BT <= high)
    if rejection.level == "sequence-max":
        inside_BT = jnp.all(inside_BT | ~mask_BT, axis=1, keepdims=True)
    return inside_BT


@jax.jit
def sampler_gap(
    old_logp_BT: Float[Array, "B T"], sampler_logp_BT: Float[Array, "B T"], mask_BT: Bool[Array, "B T"]
) -> dict[str, Float[Array, ""]]:
    """Measure the disagreement of sampler and trainer on the sampled tokens, before any truncation.

        logp_gap             |difference| of log-probabilities in nats: mean (about 1e-5 in float32) and maximum
        probability_error    mean of exp|difference|, the factor between the probabilities; healthy below 1.05
        kl, kl_reverse       k3 of KL(sampler || trainer), healthy below 1e-3, and of KL(trainer || sampler)
        effective_fraction   mean(w)^2 / mean(w^2) of the weights w = pi_old / pi_sampler, in (0, 1]

    All are 0 for an empty mask.

    Source: k3: Schulman 2020 (joschu.net/blog/kl-approx.html); effective sample size: Kong 1992 (A note on importance
    sampling using standardized weights).
    """
    old_logp_BT, sampler_logp_BT = selected(old_logp_BT, mask_BT), selected(sampler_logp_BT, mask_BT)
    gap_BT = jnp.abs(old_logp_BT - sampler_logp_BT)
    ratio_BT = jnp.exp(_log_ratio(old_logp_BT, sampler_logp_BT, mask_BT))
    return {
        "sampler/logp_gap_mean": masked_mean(gap_BT, mask_BT),
        "sampler/logp_gap_max": gap_BT.max(),
        "sampler/probability_error": masked_mean(jnp.exp(jnp.minimum(gap_BT, LOG_RATIO_LIMIT)), mask_BT),
        "sampler/kl": masked_mean(kl_estimate(sampler_logp_BT, old_logp_BT, estimator="k3"), mask_BT),
        "sampler/kl_reverse": masked_mean(kl_estimate(old_logp_BT, sampler_logp_BT, estimator="k3"), mask_BT),
        "sampler/effective_fraction": _effective_fraction(ratio_BT, mask_BT),
    }


def _effective_fraction(weight_BT: Array, mask_BT: Array) -> Array:
    """Compute mean(w)^2 / mean(w^2), with the variance in the denominator so that rounding cannot exceed 1."""
    mean = masked_mean(weight_BT, mask_BT)
    square = jnp.square(mean) + masked_mean(jnp.square(weight_BT - mean), mask_BT)
    return jnp.square(mean) / jnp.where(square > 0, square, 1.0)


def _log_ratio(old_logp_BT: Array, sampler_logp_BT: Array, mask_BT: Array) -> Array:
    return _bounded(selected(old_logp_BT, mask_BT) - selected(sampler_logp_BT, mask_BT))


def _bounded(log_ratio: Array) -> Array:
    return jnp.clip(log_ratio, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
