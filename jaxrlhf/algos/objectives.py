"""Training objectives: one function per kind of model, each a weighted loss per token.

An objective is `objective(output, mask, weight, fields, settings) -> ObjectiveTerms`. The trainer calls it inside `jit`
on packed rows, sums `loss` over all tokens of the update and reports the mean of each metric over the mask of trained
tokens. A token's weight is its aggregation weight times its importance weight. Weights contain all denominators, so an
objective never averages. An objective may sum over a sequence, or over the two answers of a pair. The trainer adds the
field `segment`: int32, number of the token's sequence in its row.

Outside the mask every input may be infinite or NaN. Inputs are therefore selected with the mask *before* any formula:
selecting only the result would leave 0 * inf in the gradient.
"""

from collections.abc import Mapping
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Bool, Float, Int, Num

from jaxrlhf.algos.kl import kl_estimate
from jaxrlhf.algos.losses import PolicyTokens, clipped_value_loss
from jaxrlhf.algos.masked import selected
from jaxrlhf.batch import Array
from jaxrlhf.config import KLInLoss, PolicyGradient, ValueLoss, function_of

Mask = Bool[Array, "R W"]
TokenValues = Float[Array, "R W"]
Fields = Mapping[str, Num[Array, "R W ..."]]


class TokenOutput(NamedTuple):
    """Log-probability of each token, and optional further values of its distribution.

    Attributes:
      named: Log-probabilities of alternative tokens at the same position.
      names: Ids of the alternative tokens, below 0 for none; None if the caller gave the ids.
    """

    logp: Float[Array, "R W"]
    entropy: Float[Array, "R W"] | None = None
    named: Float[Array, "R W K"] | None = None
    names: Int[Array, "R W K"] | None = None


class ObjectiveTerms(NamedTuple):
    """Per-token results of an objective, 0 outside the mask.

    Attributes:
      loss: Weighted loss; the trainer minimizes its sum over all rows of the update.
      metrics: Unweighted values by name, to be averaged over the mask.
    """

    loss: Float[Array, "R W"]
    metrics: dict[str, Float[Array, "R W"]]


def policy_objective(
    output: TokenOutput, mask: Mask, weight: TokenValues, fields: Fields, settings: PolicyGradient
) -> ObjectiveTerms:
    """Compute the policy's loss, with KL to the reference and an entropy bonus if configured.

        weight * loss(logp, old_logp, advantage) + kl_weight * kl(logp, ref_logp) - entropy_weight * entropy

    Args:
      output: Log-probabilities of the current policy, temperature applied.
      fields: `advantage`; `old_logp`, or instead `sampler_logp` if the current policy is the old policy (then only a
        metric reads it); `ref_logp` and `kl_weight` if `settings.kl` is in the loss; `entropy_weight` if
        `settings.policy.entropy_coefficient` is not 0; `segment` for losses of whole responses. `kl_weight` and
        `entropy_weight` contain the coefficients.

    Raises:
      ValueError: A field is missing, or a weight is present that the settings do not use.

    Source: Schulman et al. 2017 (arXiv:1707.06347), eq. 7 and 9; KL in the loss: Shao et al. 2024 (arXiv:2402.03300),
    eq. 3 and 4.
    """
    policy = settings.policy
    in_loss = settings.kl if isinstance(settings.kl, KLInLoss) else None
    _require(fields, "kl_weight", in_loss is not None, "settings.kl is KLInLoss")
    _require(fields, "entropy_weight", policy.entropy_coefficient != 0, "entropy_coefficient is not 0")

    weight, logp = selected(weight, mask), selected(output.logp, mask)
    itself = "sampler_logp" in fields
    tokens = PolicyTokens(
        logp,
        lax.stop_gradient(logp) if itself else _field(fields, "old_logp", mask),
        _field(fields, "advantage", mask),
        _field(fields, "segment", mask) if "segment" in fields else None,
    )
    terms = function_of(policy, "function")(tokens, policy)
    loss = weight * terms.loss
    metrics = {
        **{name: selected(value.astype(loss.dtype), mask) for name, value in terms.metrics.items()},
        "policy/kl_old": -tokens.log_ratio,
        "policy/ratio_mean": selected(terms.ratio, mask),
    }
    if itself:
        metrics["sampler/logp_gap_mean"] = jnp.abs(logp - _field(fields, "sampler_logp", mask))
    if in_loss is not None:
        kl = kl_estimate(logp, _field(fields, "ref_logp", mask), estimator=in_loss.estimator)
        loss += _field(fields, "kl_weight", mask) * kl
        metrics["kl/ref_loss"] = kl
    if "entropy_weight" in fields:
        assert output.entropy is not None, "the entropy bonus requires the output's entropy"
        entropy = selected(output.entropy, mask)
        loss -= _field(fields, "entropy_weight", mask) * entropy
        metrics["policy/entropy_exact"] = entropy
    return ObjectiveTerms(loss, metrics)


def imitating_objective(
    output: TokenOutput, mask: Mask, weight: TokenValues, fields: Fields, settings: PolicyGradient
) -> ObjectiveTerms:
    """Compute `policy_objective` plus `-imitation_weight * logp` on tokens of good responses.

    Source: Yue et al. 2025 (VAPO, arXiv:2504.05118), section 3.4.
    """
    policy = policy_objective(output, mask, weight, fields, settings)
    nll = -selected(output.logp, mask)
    imitation = _field(fields, "imitation_weight", mask)
    metrics = {**policy.metrics, "vapo/imitation_loss": jnp.where(imitation > 0, nll, 0.0)}
    return ObjectiveTerms(policy.loss + imitation * nll, metrics)


def mixed_objective(
    output: TokenOutput, mask: Mask, weight: TokenValues, fields: Fields, settings: PolicyGradient
) -> ObjectiveTerms:
    """Compute `policy_objective` on sampled responses, and `-example_weight * logp` on examples in the same rows.

    Args:
      fields: In addition `example_weight`, above 0 at the tokens of examples and 0 elsewhere; and `metric_weight`, the
        factor that turns means over the mask into means over the responses, or over the examples.

    Source: Ouyang et al. 2022 (arXiv:2203.02155), eq. 2, with its pretraining term.
    """
    example_weight = _field(fields, "example_weight", mask)
    sampled = mask & (example_weight == 0)
    policy = policy_objective(output, sampled, weight, fields, settings)
    nll = -selected(output.logp, mask & ~sampled)
    scale = _field(fields, "metric_weight", mask)
    metrics = {name: scale * value for name, value in {**policy.metrics, "ptx/loss": nll}.items()}
    return ObjectiveTerms(policy.loss + example_weight * nll, metrics)


def value_objective(
    output: TokenValues, mask: Mask, weight: TokenValues, fields: Fields, settings: ValueLoss
) -> ObjectiveTerms:
    """Compute the clipped value loss, `weight * clipped_value_loss`.

    Args:
      output: Critic's value of the prefix before each token.
      fields: `returns` and `old_value`.

    Raises:
      ValueError: A field is missing.

    Source: Schulman et al. 2017 (arXiv:1707.06347), eq. 9; see `clipped_value_loss`.
    """
    old_value, returns = _field(fields, "old_value", mask), _field(fields, "returns", mask)
    loss, clipped = clipped_value_loss(selected(output, mask), old_value, returns, clip=settings.clip)
    metrics = {"value/loss": loss, "value/clip_fraction": clipped.astype(loss.dtype)}
    return ObjectiveTerms(selected(weight, mask) * loss, metrics)


def nll_objective(
    output: TokenOutput, mask: Mask, weight: TokenValues, fields: Fields, settings: object
) -> ObjectiveTerms:
    """Compute the SFT loss: the weighted negative log-likelihood. Fields and settings are not read.

    Source: Ouyang et al. 2022 (arXiv:2203.02155), section 3.5 (SFT).
    """
    nll = -selected(output.logp, mask)
    return ObjectiveTerms(selected(weight, mask) * nll, {"supervised/loss": nll})


def _field(fields: Mapping[str, Array], name: str, mask: Array) -> Array:
    if name not in fields:
        raise ValueError(f"the objective requires the field {name!r}; the experience has {sorted(fields)}")
    return selected(fields[name], mask)


def _require(fields: Mapping[str, Array], name: str, wanted: bool, reason: str) -> None:
    """Raise `ValueError` if a field is missing although the settings use it, or present although they do not."""
    if wanted != (name in fields):
        raise ValueError(
            f"the experience {'has the' if name in fields else 'has no'} field {name!r}, which is expected if and only "
            f"if {reason}"
        )
