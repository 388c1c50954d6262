"""Entropy kept up by treating the few tokens that lower it most: those of large advantage and large log-probability.

The entropy of a policy falls by the covariance of its log-probabilities and what they are pushed by. Tokens are chosen
before the update, by the old policy, among all of a step: a choice that packing and microbatches do not change.

Source: Cui et al. 2025 (The entropy mechanism of reinforcement learning for reasoning language models,
arXiv:2505.22617), section 4.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float

from jaxrlhf.algos.losses import PolicyTerms, PolicyTokens, clipped_policy_loss
from jaxrlhf.batch import Array
from jaxrlhf.config import ClipCovLoss, KLCovLoss


def token_covariance(
    advantage_BT: Float[Array, "B T"], logp_BT: Float[Array, "B T"], mask_BT: Bool[Array, "B T"]
) -> Float[np.ndarray, "B T"]:
    """Share of each token in the covariance of advantages and log-probabilities; -inf outside the mask.

    cov_t = (A_t - mean(A)) * (logp_t - mean(logp)),  means over the mask
    """
    mask_BT = np.asarray(mask_BT, bool)
    count, product_BT = max(np.count_nonzero(mask_BT), 1), np.ones(mask_BT.shape)
    for value_BT in (advantage_BT, logp_BT):
        inside_BT = np.where(mask_BT, np.asarray(value_BT, np.float64), 0.0)
        product_BT *= inside_BT - inside_BT.sum() / count
    return np.where(mask_BT, product_BT, -np.inf)


def drawn_in_range(
    advantage_BT: Array, logp_BT: Array, mask_BT: Array, rng: np.random.Generator, settings: ClipCovLoss
) -> Bool[np.ndarray, "B T"]:
    """Tokens that Clip-Cov leaves out: drawn from those of a covariance in the range, one at least if there is any."""
    cov_BT = token_covariance(advantage_BT, logp_BT, mask_BT)
    inside = np.flatnonzero((settings.covariance_low < cov_BT) & (cov_BT < settings.covariance_high))
    return _at(rng.permutation(inside)[: _count(mask_BT, settings.share)], cov_BT)


def largest(
    advantage_BT: Array, logp_BT: Array, mask_BT: Array, rng: np.random.Generator, settings: KLCovLoss
) -> Bool[np.ndarray, "B T"]:
    """Tokens that KL-Cov holds: those of the largest covariance, one at least."""
    cov_BT = token_covariance(advantage_BT, logp_BT, mask_BT)
    likeliest = np.argsort(-cov_BT, axis=None, kind="stable")[: _count(mask_BT, settings.share)]
    return _at(likeliest, cov_BT) & np.asarray(mask_BT, bool)


def clip_cov_loss(tokens: PolicyTokens, settings: ClipCovLoss) -> PolicyTerms:
    """`clipped_policy_loss`, and 0 for the tokens that were chosen.

    Source: Cui et al. 2025 (arXiv:2505.22617), section 4.2, Clip-Cov.
    """
    chosen, terms = _chosen(tokens), clipped_policy_loss(tokens, settings)
    return PolicyTerms(jnp.where(chosen, 0.0, terms.loss), terms.ratio, terms.metrics | {"policy/chosen": chosen})


def kl_cov_loss(tokens: PolicyTokens, settings: KLCovLoss) -> PolicyTerms:
    """The loss of the ratio, and for the tokens that were chosen their distance to the old policy.

        loss = -A * ratio + coefficient * |log ratio|    the second where chosen

    Source: Cui et al. 2025 (arXiv:2505.22617), section 4.2, KL-Cov; the distance is that of the authors' code.
    """
    chosen, ratio = _chosen(tokens), jnp.exp(tokens.log_ratio)
    away = jnp.where(chosen, settings.coefficient * jnp.abs(tokens.log_ratio), 0.0)
    return PolicyTerms(-tokens.advantage * ratio + away, ratio, {"policy/chosen": chosen})


def _chosen(tokens: PolicyTokens) -> Any:
    if tokens.chosen is None:
        raise ValueError("a loss that treats some tokens otherwise needs the field 'chosen': which tokens those are")
    return tokens.chosen


def _count(mask_BT: Array, share: float) -> int:
    return max(1, int(share * np.count_nonzero(mask_BT)))


def _at(places: np.ndarray, like_BT: np.ndarray) -> np.ndarray:
    """True at these places of the flattened array."""
    found = np.zeros(like_BT.size, bool)
    found[places] = True
    return found.reshape(like_BT.shape)
