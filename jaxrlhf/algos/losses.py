"""Policy and value losses per token, before weighting and summing.

All losses except GSPO's and GMPO's are elementwise, so shape and packing do not matter. Tokens outside the mask must
have finite numbers; `jaxrlhf.algos.objectives` ensures that. If `logp == old_logp`, every policy loss has the gradient
of `-A * logp`.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Bool, Float, Int

from jaxrlhf.algos.kl import LOG_RATIO_LIMIT
from jaxrlhf.algos.masked import segment_mean
from jaxrlhf.batch import Array
from jaxrlhf.config import CISPOLoss, DPPOLoss, DROLoss, GMPOLoss, GSPOLoss, PolicyLoss, SAPOLoss


class PolicyTokens(NamedTuple):
    """Inputs of a policy loss for each token; finite everywhere, 0 for tokens that are not trained.

    Attributes:
      logp: Log-probability under the current policy, temperature applied; gradients are with respect to it.
      old_logp: Log-probability under the policy at the start of the update.
      advantage: Advantage of the token.
      segment: Number of the token's sequence in its row, from 1; only losses of whole sequences need segments.
    """

    logp: Float[Array, "*shape"]
    old_logp: Float[Array, "*shape"]
    advantage: Float[Array, "*shape"]
    segment: Int[Array, "*shape"] | None = None

    @property
    def log_ratio(self) -> Float[Array, "*shape"]:
        """log(pi / pi_old), within +-20."""
        return jnp.clip(jnp.subtract(self.logp, self.old_logp), -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


class PolicyTerms(NamedTuple):
    """Per-token results of a policy loss.

    Attributes:
      loss: Loss of a token, to be weighted and summed.
      ratio: pi / pi_old, per token or per response.
      metrics: Further values by name, to be averaged over the mask.
    """

    loss: Float[Array, "*shape"]
    ratio: Float[Array, "*shape"]
    metrics: dict[str, Array]


def clipped_policy_loss(tokens: PolicyTokens, settings: PolicyLoss) -> PolicyTerms:
    """Compute PPO's clipped surrogate loss.

        ratio = exp(clip(logp - old_logp, -20, 20))
        loss  = max(-A * ratio, -A * clip(ratio, 1 - clip_low, 1 + clip_high))
        loss  = min(loss, -dual_clip * A)  where A < 0

    The dual clip bounds the loss of tokens with a negative advantage that became much likelier.

    Source: Schulman et al. 2017 (arXiv:1707.06347), eq. 7; two-sided bounds: Yu et al. 2025 (DAPO, arXiv:2503.14476),
    eq. 10; dual clip: Ye et al. 2020 (arXiv:1912.09729).
    """
    advantage, ratio = tokens.advantage, jnp.exp(tokens.log_ratio)
    loss, clipped = _clipped(ratio, advantage, settings.clip_low, settings.clip_high)
    clipped_low: Array = jnp.zeros(loss.shape, bool)
    if settings.dual_clip is not None:
        bound = -settings.dual_clip * advantage
        clipped_low = (advantage < 0) & (loss > bound)
        loss = jnp.where(clipped_low, bound, loss)
    return PolicyTerms(loss, ratio, {"policy/clip_fraction": clipped, "policy/clip_fraction_lower": clipped_low})


def gspo_loss(tokens: PolicyTokens, settings: GSPOLoss) -> PolicyTerms:
    """Compute the GSPO loss (group sequence policy optimization): the clipped surrogate of a response's ratio.

        s_i   = exp(mean over the trained tokens of response i of log(pi / pi_old))
        s_i,t = sg(s_i) * pi / sg(pi)
        loss  = max(-A * s_i,t, -A * clip(s_i,t, 1 - clip_low, 1 + clip_high))

    where sg stops the gradient. Every token of a response has the value s_i, and the mean over the tokens has the
    gradient of s_i. Advantages may differ from token to token (GSPO-token).

    Raises:
      ValueError: `tokens` has no segments.

    Source: Zheng et al. 2025 (arXiv:2507.18071), section 4; the form with s_i,t is GSPO-token's.
    """
    ratio = _geometric_mean(tokens.log_ratio, tokens.segment, "GSPO")
    loss, clipped = _clipped(ratio, tokens.advantage, settings.clip_low, settings.clip_high)
    return PolicyTerms(loss, ratio, {"policy/clip_fraction": clipped})


def gmpo_loss(tokens: PolicyTokens, settings: GMPOLoss) -> PolicyTerms:
    """Compute the GMPO loss (geometric-mean policy optimization), on the geometric mean of a response's clipped ratios.

        x_t   = log(pi / pi_old), at most clip_high where A > 0 and at least -clip_low where A < 0
        s_i   = exp(mean over the trained tokens of response i of x_t)
        s_i,t = sg(s_i) * exp(x_t - sg(x_t))
        loss  = -A * s_i,t

    where sg stops the gradient, as in `gspo_loss`. A clipped token has no gradient; the other tokens keep theirs.

    Raises:
      ValueError: `tokens` has no segments.

    Source: Zhao et al. 2025 (arXiv:2507.20673), section 3.
    """
    own = tokens.log_ratio
    high = jnp.where(tokens.advantage > 0, settings.clip_high, jnp.inf)
    low = jnp.where(tokens.advantage < 0, -settings.clip_low, -jnp.inf)
    ratio = _geometric_mean(jnp.clip(own, low, high), tokens.segment, "GMPO")
    return PolicyTerms(-tokens.advantage * ratio, ratio, {"policy/clip_fraction": (own > high) | (own < low)})


def cispo_loss(tokens: PolicyTokens, settings: CISPOLoss) -> PolicyTerms:
    """Compute the CISPO loss (clipped importance-sampling-weight policy optimization): every token keeps a gradient.

        loss = -sg(clip(ratio, ratio_low, ratio_high)) * A * logp

    where sg stops the gradient.

    Source: MiniMax 2025 (MiniMax-M1, arXiv:2506.13585), section 3.1; `ratio_high` as in Khatri et al. 2025 (ScaleRL,
    arXiv:2510.13786).
    """
    ratio = lax.stop_gradient(jnp.exp(tokens.log_ratio))
    bounded = jnp.clip(ratio, settings.ratio_low, settings.ratio_high)
    return PolicyTerms(-bounded * tokens.advantage * tokens.logp, ratio, {"policy/clip_fraction": bounded != ratio})


def sapo_loss(tokens: PolicyTokens, settings: SAPOLoss) -> PolicyTerms:
    """Compute the SAPO loss (soft adaptive policy optimization): a sigmoid of the ratio instead of the clip.

        loss = -A * sigmoid(tau * (ratio - 1)) * 4 / tau

    with tau the positive temperature if A > 0, else the negative temperature. The gradient is the gradient of
    -A * ratio, times the gate 4 * p * (1 - p) with p the sigmoid. The gate is 1 at ratio 1 and falls to both sides.

    Source: Gao et al. 2025 (Soft adaptive policy optimization, arXiv:2511.20347).
    """
    ratio = jnp.exp(tokens.log_ratio)
    tau = jnp.where(tokens.advantage > 0, settings.temperature_positive, settings.temperature_negative)
    soft = jax.nn.sigmoid(tau * (ratio - 1))
    return PolicyTerms(-tokens.advantage * soft * 4 / tau, ratio, {"policy/gate": 4 * soft * (1 - soft)})


def dppo_loss(tokens: PolicyTokens, settings: DPPOLoss) -> PolicyTerms:
    """Compute the DPPO loss (divergence proximal policy optimization): a token that moved too far has no gradient.

        loss = -sg(min(ratio, ratio_high)) * A * logp    inside the trust region, 0 outside

    With p = pi_old and q = pi of the token, a token is outside if it moved in the direction of A by more than the
    limit, measured by |q - p| or by KL(Bernoulli(p) || Bernoulli(q)).

    Source: Qi et al. 2026 (Rethinking the trust region in LLM reinforcement learning, arXiv:2602.04879), binary TV and
    binary KL.
    """
    logp, old_logp = lax.stop_gradient(tokens.logp), jnp.minimum(tokens.old_logp, 0.0)
    old, new = jnp.exp(old_logp), jnp.exp(jnp.minimum(logp, 0.0))
    moved = jnp.abs(new - old) if settings.divergence == "tv" else _binary_kl(old, new, tokens.log_ratio)
    limit = jnp.where(tokens.advantage > 0, settings.limit_high, settings.limit_low)
    outside = (moved > limit) & ((new - old) * tokens.advantage > 0)
    ratio = lax.stop_gradient(jnp.exp(tokens.log_ratio))
    loss = -jnp.minimum(ratio, settings.ratio_high) * tokens.advantage * tokens.logp
    return PolicyTerms(jnp.where(outside, 0.0, loss), ratio, {"policy/clip_fraction": outside})


def _binary_kl(old: Array, new: Array, log_ratio: Array) -> Array:
    """Compute KL(Bernoulli(old) || Bernoulli(new)) of the probabilities of a token."""
    rest_old, rest_new = (jnp.maximum(1 - chance, jnp.finfo(chance.dtype).tiny) for chance in (old, new))
    return lax.stop_gradient(-old * log_ratio + rest_old * (jnp.log(rest_old) - jnp.log(rest_new)))


def dro_loss(tokens: PolicyTokens, settings: DROLoss) -> PolicyTerms:
    """Compute the DRO loss (direct reward optimization): policy gradient with a quadratic penalty instead of the clip.

        loss = -A * logp + beta / 2 * (logp - old_logp)^2

    Source: Richemond et al. 2024 (arXiv:2405.19107), per token as in Kimi Team 2025 (k1.5, arXiv:2501.12599).
    """
    away = tokens.log_ratio
    loss = -tokens.advantage * tokens.logp + settings.beta / 2 * jnp.square(away)
    return PolicyTerms(loss, lax.stop_gradient(jnp.exp(away)), {})


def _geometric_mean(log_ratio: Array, segment: Array | None, name: str) -> Array:
    """Return the geometric mean of a response's ratios at each token, with the gradient of the token's own log-ratio.

    The mean over the tokens then has the gradient of the geometric mean.
    """
    if segment is None:
        raise ValueError(f"{name} requires the field 'segment', the sequence of each token in its row")
    constant = lax.stop_gradient(log_ratio)
    return jnp.exp(segment_mean(constant, segment) + (log_ratio - constant))


def _clipped(ratio: Array, advantage: Array, clip_low: float, clip_high: float) -> tuple[Array, Array]:
    """Return the maximum of the losses with the ratio and with the clipped ratio, and True where clipping decides."""
    plain = -advantage * ratio
    clipped = -advantage * jnp.clip(ratio, 1 - clip_low, 1 + clip_high)
    return jnp.maximum(plain, clipped), clipped > plain


def clipped_value_loss(
    value: Float[Array, "*shape"], old_value: Float[Array, "*shape"], returns: Float[Array, "*shape"], *, clip: float
) -> tuple[Float[Array, "*shape"], Bool[Array, "*shape"]]:
    """Compute the clipped value loss, half the squared error; also return True where clipping decides.

        v_clip = old_value + clip(value - old_value, -clip, clip)
        loss   = max((value - returns)^2, (v_clip - returns)^2) / 2

    Args:
      value: Value of the current critic; gradients are with respect to it. All arguments are in reward units.
      old_value: Value of the critic at the start of the update.
      clip: Distance from the old value beyond which the value is clipped; the larger loss counts.

    Source: OpenAI Baselines; described in Engstrom et al. 2020 (arXiv:2005.12729), section 3.
    """
    near_value = jnp.clip(value, old_value - clip, old_value + clip)
    plain = jnp.square(value - returns)
    clipped = jnp.square(near_value - returns)
    return jnp.maximum(plain, clipped) / 2, clipped > plain
