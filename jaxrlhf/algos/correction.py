"""The gap between the policy that sampled and the trainer's idea of the same policy."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float

from jaxrlhf.algos.kl import LOG_RATIO_LIMIT, kl_estimate
from jaxrlhf.algos.masked import masked_mean, selected
from jaxrlhf.batch import Array


def truncated_importance(
    old_logp_BT: Float[Array, "B T"],
    sampler_logp_BT: Float[Array, "B T"],
    mask_BT: Bool[Array, "B T"],
    *,
    cap: float,
) -> Float[Array, "B T"]:
    """Importance weight of each token, `min(pi_old / pi_sampler, cap)`; 0 outside the mask.

    Multiply token weights by it. It is a constant: nothing differentiates through it.

    Args:
      old_logp_BT: Trainer's log-probabilities at the start of the update.
      sampler_logp_BT: As reported while sampling.
      cap: Bounds the variance, at the price of bias; above 0.

    Source: Ionides 2008 (Truncated importance sampling); per token for language models:
    Yao et al. 2025 (Your efficient RL framework secretly brings you off-policy RL training).
    """
    ratio_BT = _ratio(old_logp_BT, sampler_logp_BT, mask_BT)
    return selected(jnp.minimum(ratio_BT, cap), mask_BT)


class SamplerGap(NamedTuple):
    """How far sampler and trainer disagree on the sampled tokens; all scalars, 0 for an empty mask.

    Attributes:
      mean: Mean |difference| of log-probabilities, in nats; float32 engines reach 1e-5.
      max: Largest |difference|.
      probability_error: Mean of exp|difference|, the factor by which probabilities are off;
        1 is perfect, healthy below 1.05.
      kl_sampler_trainer: k3 estimate of KL(sampler || trainer); healthy below 1e-3.
      kl_trainer_sampler: The same with the roles exchanged.
      effective_fraction: Effective sample size of the importance weights over the number of
        tokens, in (0, 1].
    """

    mean: Float[Array, ""]
    max: Float[Array, ""]
    probability_error: Float[Array, ""]
    kl_sampler_trainer: Float[Array, ""]
    kl_trainer_sampler: Float[Array, ""]
    effective_fraction: Float[Array, ""]


@jax.jit
def sampler_gap(
    old_logp_BT: Float[Array, "B T"], sampler_logp_BT: Float[Array, "B T"], mask_BT: Bool[Array, "B T"]
) -> SamplerGap:
    """Diagnose the sampler-trainer gap, before any truncation.

    The effective fraction is `mean(w)^2 / mean(w^2)` of the weights w = pi_old / pi_sampler.

    Source: k3: Schulman 2020 (joschu.net/blog/kl-approx.html); effective sample size: Kong 1992
    (A note on importance sampling using standardized weights).
    """
    old_logp_BT, sampler_logp_BT = selected(old_logp_BT, mask_BT), selected(sampler_logp_BT, mask_BT)
    gap_BT = jnp.abs(old_logp_BT - sampler_logp_BT)
    ratio_BT = _ratio(old_logp_BT, sampler_logp_BT, mask_BT)
    square = masked_mean(jnp.square(ratio_BT), mask_BT)
    return SamplerGap(
        mean=masked_mean(gap_BT, mask_BT),
        max=gap_BT.max(),
        probability_error=masked_mean(jnp.exp(jnp.minimum(gap_BT, LOG_RATIO_LIMIT)), mask_BT),
        kl_sampler_trainer=masked_mean(kl_estimate(sampler_logp_BT, old_logp_BT, estimator="k3"), mask_BT),
        kl_trainer_sampler=masked_mean(kl_estimate(old_logp_BT, sampler_logp_BT, estimator="k3"), mask_BT),
        effective_fraction=jnp.square(masked_mean(ratio_BT, mask_BT)) / jnp.where(square > 0, square, 1.0),
    )


def _ratio(old_logp_BT: Array, sampler_logp_BT: Array, mask_BT: Array) -> Array:
    difference_BT = selected(old_logp_BT, mask_BT) - selected(sampler_logp_BT, mask_BT)
    return jnp.exp(jnp.clip(difference_BT, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))
