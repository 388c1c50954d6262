"""Clip-Cov and KL-Cov: losses that keep up a policy's entropy by special treatment of high-covariance tokens.

The entropy of a policy falls with the covariance of its log-probabilities and advantages. The few tokens with the
largest covariance lower the entropy most. Tokens are selected before the update, with the old policy, among all tokens
of a step: packing and microbatches do not change the selection.

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
    """Compute each token's term of the covariance of advantages and log-probabilities; -inf outside the mask.

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
    """Select the tokens that Clip-Cov leaves out: a random sample of the tokens with a covariance in the range.

    At least one token is selected, if the range has any.
    """
    cov_BT = token_covariance(advantage_BT, logp_BT, mask_BT)
    inside = np.flatnonzero((settings.covariance_low < cov_BT) & (cov_BT < settings.covariance_high))
    return _at(rng.permutation(inside)[: _count(mask_BT, settings.share)], cov_BT)


def largest(
    advantage_BT: Array, logp_BT: Array, mask_BT: Array, rng: np.random.Generator, settings: KLCovLoss
) -> Bool[np.ndarray, "B T"]:
    """Select the tokens that KL-Cov penalizes: the tokens with the largest covariance, at least one."""
    cov_BT = token_covariance(advantage_BT, logp_BT, mask_BT)
    likeliest = np.argsort(-cov_BT, axis=None, kind="stable")[: _count(mask_BT, settings.share)]
    return _at(likeliest, cov_BT) & np.asarray(mask_BT, bool)


def clip_cov_loss(tokens: PolicyTokens, settings: ClipCovLoss) -> PolicyTerms:
    """Compute `clipped_policy_loss`, with 0 at the selected tokens (`tokens.chosen`).

    Source: Cui et al. 2025 (arXiv:2505.22617), section 4.2, Clip-Cov.
    """
    chosen, terms = _chosen(tokens), clipped_policy_loss(tokens, settings)
    return PolicyTerms(jnp.where(chosen, 0.0, terms.loss), terms.ratio, terms.metrics | {"policy/chosen": chosen})


def kl_cov_loss(tokens: PolicyTokens, settings: KLCovLoss) -> PolicyTerms:
    """Compute the unclipped policy loss, plus a penalty on the distance to the old policy at the selected tokens.

        loss = -A * ratio + [token is in tokens.chosen] * coefficient * |log ratio|

    Source: Cui et al. 2025 (arXiv:2505.22617), section 4.2, KL-Cov; the distance is that of the authors' code.
    """
    chosen, ratio = _chosen(tokens), jnp.exp(tokens.log_ratio)
    away = jnp.where(chosen, settings.coefficient * jnp.abs(tokens.log_ratio), 0.0)
    return PolicyTerms(-tokens.advantage * ratio + away, ratio, {"policy/chosen": chosen})


def _chosen(tokens: PolicyTokens) -> Any:
    if tokens.chosen is None:
        raise ValueError("a loss with a selection of tokens needs the field 'chosen', true at the selected tokens")
    return tokens.chosen


def _count(mask_BT: Array, share: float) -> int:
    return max(1, int(share * np.count_nonzero(mask_BT)))


def _at(places: np.ndarray, like_BT: np.ndarray) -> np.ndarray:
    """Return an array like `like_BT` with True at these indices of the flattened array."""
    found = np.zeros(like_BT.size, bool)
    found[places] = True
    return found.reshape(like_BT.shape)
