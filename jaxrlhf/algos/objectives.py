"""Objectives of trainers: one function per kind of model, each a weighted loss per token.

An objective is `objective(output, mask, weight, fields, settings) -> ObjectiveTerms`. The trainer calls it inside `jit`
on packed rows, sums `loss` over all tokens of the update and reports the mean of each metric over the mask, which is of
trained tokens. Weights are those of the aggregation times those of importance: all denominators are in them, so an
objective never reduces. The trainer adds the field `segment`, int32: the sequence of its row that a token belongs to.

Outside the mask every input may be infinite or NaN. Inputs are therefore selected *before* any formula sees them:
selecting only the result would leave 0 * inf in the gradient.
"""

from collections.abc import Mapping
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Bool, Float, Int, Num

from jaxrlhf.algos.kl import event_divergence, kl_estimate
from jaxrlhf.algos.losses import PolicyTokens, clipped_value_loss
from jaxrlhf.algos.masked import segment_sum, selected
from jaxrlhf.batch import Array
from jaxrlhf.config import LUFFY, KLInLoss, LogitDistillation, PolicyGradient, ValueLoss, function_of

_NO_EVENT = -1e9  # finite, so that a chance of 0 times a difference of two is 0

Mask = Bool[Array, "R W"]
TokenValues = Float[Array, "R W"]
Fields = Mapping[str, Num[Array, "R W ..."]]


class TokenOutput(NamedTuple):
    """Log-probability of each token, and more of its distribution where that is asked for.

    Attributes:
      named: Log-probabilities of other tokens in its place.
      names: Ids of those, below 0 where there is none; None where they were given.
    """

    logp: Float[Array, "R W"]
    entropy: Float[Array, "R W"] | None = None
    named: Float[Array, "R W K"] | None = None
    names: Int[Array, "R W K"] | None = None


class ObjectiveTerms(NamedTuple):
    """Per-token results, 0 outside the mask.

    Attributes:
      loss: Weighted loss; its sum over all rows of the update is minimised.
      metrics: Unweighted values by name, to be averaged over the mask.
    """

    loss: Float[Array, "R W"]
    metrics: dict[str, Float[Array, "R W"]]


def policy_objective(
    output: TokenOutput, mask: Mask, weight: TokenValues, fields: Fields, settings: PolicyGradient
) -> ObjectiveTerms:
    """The policy's loss, with KL to the reference and an entropy bonus where configured.

        weight * loss(logp, old_logp, advantage) + kl_weight * kl(logp, ref_logp) - entropy_weight * entropy

    Args:
      output: Log-probabilities by the current policy, temperature applied.
      fields: `advantage`; `old_logp`, or `sampler_logp` where the current policy is the old one, which is then only
        compared with it; `ref_logp` and `kl_weight` if `settings.kl` is in the loss; `entropy_weight` if
        `settings.policy.entropy_coefficient` is not 0; `segment` if the loss is of whole responses; `chosen` if it
        has a `selection`. The coefficients are in those weights.

    Raises:
      ValueError: If a field is missing, or is given where the settings do not use it.

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
        _field(fields, "chosen", mask) > 0 if "chosen" in fields else None,
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
        assert output.entropy is not None, "the bonus needs an entropy"
        entropy = selected(output.entropy, mask)
        loss -= _field(fields, "entropy_weight", mask) * entropy
        metrics["policy/entropy_exact"] = entropy
    return ObjectiveTerms(loss, metrics)


def imitating_objective(
    output: TokenOutput, mask: Mask, weight: TokenValues, fields: Fields, settings: PolicyGradient
) -> ObjectiveTerms:
    """`policy_objective` plus `-imitation_weight * logp` on tokens of good responses.

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
    """`policy_objective` on sampled responses, and `-example_weight * logp` on examples among them.

    Args:
      fields: Further `example_weight`, above 0 at the tokens of examples and 0 elsewhere; and `metric_weight`, which
        turns means over the mask into means over the responses, or over the examples.

    Source: Ouyang et al. 2022 (arXiv:2203.02155), eq. 2, with its pretraining term.
    """
    example_weight = _field(fields, "example_weight", mask)
    sampled = mask & (example_weight == 0)
    policy = policy_objective(output, sampled, weight, fields, settings)
    nll = -selected(output.logp, mask & ~sampled)
    scale = _field(fields, "metric_weight", mask)
    metrics = {name: scale * value for name, value in {**policy.metrics, "ptx/loss": nll}.items()}
    return ObjectiveTerms(policy.loss + example_weight * nll, metrics)


def guided_objective(
    output: TokenOutput, mask: Mask, weight: TokenValues, fields: Fields, settings: LUFFY
) -> ObjectiveTerms:
    """`policy_objective` on sampled responses, and a shaped probability on solutions that another policy wrote.

        weight * -A * p / (p + gamma)    with p = exp(logp) of a solution's token

    The other policy is taken to be sure of every token, so that the importance ratio is p itself, and nothing is
    clipped. The derivative by logp, -A * gamma * p / (p + gamma)^2, is largest at p = gamma: unlikely tokens teach more
    than by the ratio, whose derivative is -A * p.

    Args:
      fields: Further `off_policy`, 1 at the tokens of solutions and 0 elsewhere; and `metric_weight`, which turns means
        over the mask into means over the responses, or over the solutions.
      settings: `shaping` is gamma; the others are those of `policy_objective`.

    Source: Yan et al. 2025 (LUFFY, arXiv:2504.14945), sections 3.1 (mixed-policy GRPO) and 3.2 (policy shaping).
    """
    solution = mask & (_field(fields, "off_policy", mask) > 0)
    sampled = policy_objective(output, mask & ~solution, weight, fields, settings)
    chance = selected(jnp.exp(selected(output.logp, solution)), solution)
    shaped = chance / (chance + settings.shaping)
    loss = -selected(weight, solution) * _field(fields, "advantage", solution) * shaped
    scale = _field(fields, "metric_weight", mask)
    metrics = {**sampled.metrics, "luffy/solution_probability": chance}
    return ObjectiveTerms(sampled.loss + loss, {name: scale * value for name, value in metrics.items()})


def span_objective(
    output: TokenOutput, mask: Mask, weight: TokenValues, fields: Fields, settings: LogitDistillation
) -> ObjectiveTerms:
    """The divergence from a teacher's distribution over each span of text, at the span's last token.

        weight * event_divergence(policy, teacher)

    The events are the text of the span, whose log-probability is the sum over its tokens, and further tokens in the
    place of a span of one.

    Args:
      output: Further `named`, log-probabilities of the tokens of the field of that name.
      mask: Tokens in spans.
      fields: Fields of `policy_objective`, with an advantage of 0; `to_last`, tokens from each to the last of its span;
        `teacher_logp` of the span; and `[R, W, K]`, at last tokens, `named`, ids of further tokens, below 0 for none,
        and `teacher_named`, the teacher's log-probabilities of those.
    """
    policy = policy_objective(output, mask, weight, fields, settings)
    assert output.named is not None, "the field `named` has them read"
    to_last = _field(fields, "to_last", mask).astype(jnp.int32)
    last = jnp.where(mask, jnp.arange(1, mask.shape[1] + 1)[None, :] + to_last, 0)
    own = segment_sum(selected(output.logp, mask), last)
    end = mask & (to_last == 0)
    there = end[..., None] & (fields["named"] >= 0)
    events, teacher = (
        jnp.concatenate([selected(span, end)[..., None], jnp.where(there, named, _NO_EVENT)], axis=-1)
        for span, named in ((own, output.named), (_field(fields, "teacher_logp", mask), fields["teacher_named"]))
    )
    divergence = selected(event_divergence(events, teacher, beta=settings.beta), end)
    loss = policy.loss + selected(weight, mask) * divergence
    return ObjectiveTerms(loss, {**policy.metrics, "spans/divergence": divergence})


def value_objective(
    output: TokenValues, mask: Mask, weight: TokenValues, fields: Fields, settings: ValueLoss
) -> ObjectiveTerms:
    """Clipped value regression, `weight * clipped_value_loss`.

    Args:
      output: The critic's value of the prefix before each token.
      fields: `returns` and `old_value`.

    Raises:
      ValueError: If a field is missing.

    Source: Schulman et al. 2017 (arXiv:1707.06347), eq. 9; see `clipped_value_loss`.
    """
    old_value, returns = _field(fields, "old_value", mask), _field(fields, "returns", mask)
    loss, clipped = clipped_value_loss(selected(output, mask), old_value, returns, clip=settings.clip)
    metrics = {"value/loss": loss, "value/clip_fraction": clipped.astype(loss.dtype)}
    return ObjectiveTerms(selected(weight, mask) * loss, metrics)


def nll_objective(
    output: TokenOutput, mask: Mask, weight: TokenValues, fields: Fields, settings: object
) -> ObjectiveTerms:
    """Supervised fine-tuning: weighted negative log-likelihood. Reads neither fields nor settings.

    Source: Ouyang et al. 2022 (arXiv:2203.02155), section 3.5 (SFT).
    """
    nll = -selected(output.logp, mask)
    return ObjectiveTerms(selected(weight, mask) * nll, {"supervised/loss": nll})


def _field(fields: Mapping[str, Array], name: str, mask: Array) -> Array:
    if name not in fields:
        raise ValueError(f"the objective needs the field {name!r}; the experience has {sorted(fields)}")
    return selected(fields[name], mask)


def _require(fields: Mapping[str, Array], name: str, wanted: bool, reason: str) -> None:
    """Raise `ValueError` if a coefficient is configured and not applied, or the reverse."""
    if wanted != (name in fields):
        raise ValueError(
            f"the experience {'has' if name in fields else 'lacks'} the field {name!r}, "
            f"which belongs there exactly if {reason}"
        )
