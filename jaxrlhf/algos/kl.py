"""Divergence from a reference policy: per-token estimators and a controller for their coefficient."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Float

from jaxrlhf.batch import Array
from jaxrlhf.config import KLEstimator

LOG_RATIO_LIMIT = 20.0
_K3_LIMIT = 10.0


def kl_estimate(
    logp: Float[Array, "*shape"], ref_logp: Float[Array, "*shape"], *, estimator: KLEstimator
) -> Float[Array, "*shape"]:
    """Estimate KL(policy || reference) from each sampled token.

    With d = logp - ref_logp:

        k1   d                     unbiased; as a loss its expected gradient is 0
        abs  |d|
        k2   d^2 / 2               biased, low variance; its gradient is the KL's
        k3   exp(-d) - 1 + d       unbiased and never negative; its gradient is not the KL's
        k1+  value of k1, gradient of k2
        k3+  value of k3, gradient of k2

    In k3, d is clamped to +-20 and the value to 10, so that one improbable token cannot dominate the batch.

    Args:
      logp: Log-probabilities of the sampled tokens under the policy. The estimate is elementwise: if values outside the
        mask may be infinite, apply `selected` first.

    Source: Schulman 2020 (joschu.net/blog/kl-approx.html) for k1, k2, k3; k3 as a loss is eq. 4 of Shao et al. 2024
    (arXiv:2402.03300); gradients as in Tang & Munos 2025 (arXiv:2506.09477).
    """
    if estimator.endswith("+"):
        value = _estimate(logp, ref_logp, estimator.removesuffix("+"))
        gradient = _estimate(logp, ref_logp, "k2")
        return gradient - lax.stop_gradient(gradient) + lax.stop_gradient(value)
    return _estimate(logp, ref_logp, estimator)


def _estimate(logp: Array, ref_logp: Array, estimator: str) -> Array:
    difference = jnp.subtract(logp, ref_logp)
    match estimator:
        case "k1":
            return difference
        case "abs":
            return jnp.abs(difference)
        case "k2":
            return jnp.square(difference) / 2
        case "k3":
            log_ratio = jnp.clip(-difference, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
            # exp(x) - 1 - x cancels catastrophically near 0, where most tokens are.
            return jnp.minimum(jnp.expm1(log_ratio) - log_ratio, _K3_LIMIT)
    raise ValueError(f"unknown KL estimator {estimator!r}; use k1, abs, k2, k3, k1+ or k3+")


def adaptive_kl_coefficient(coefficient: float, kl: float, *, target: float, horizon: int, sequences: int) -> float:
    """Return the next KL coefficient of a proportional controller that steers the KL towards a target.

        e = clip(kl / target - 1, -0.2, 0.2)
        coefficient * (1 + e * sequences / horizon)

    Args:
      kl: KL of the step: the mean over responses of each response's mean per token.
      horizon: Number of sequences over which the largest error multiplies the coefficient by about e^0.2.
      sequences: Number of responses of the step.

    Source: Ziegler et al. 2019 (arXiv:1909.08593), section 2.2.
    """
    error = min(max(kl / target - 1.0, -0.2), 0.2)
    return coefficient * (1.0 + error * sequences / horizon)
