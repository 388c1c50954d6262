"""KL-Cov: GRPO that keeps up the entropy by a penalty on a few tokens of high covariance.

    python -m jaxrlhf.train --config kl_cov.py

The loss is not clipped. The tokens with the largest covariance of log-probability and advantage are kept near the old
policy. All other settings are those of `grpo_arithmetic.py`.

Source: Cui et al. 2025 (The entropy mechanism of reinforcement learning for reasoning language models,
arXiv:2505.22617), section 4.2; the distance is that of the authors' code.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool

from jaxrlhf import algos
from jaxrlhf.batch import Array
from jaxrlhf.config import GRPO, Config, RatioLoss, load, load_module
from jaxrlhf.config.settings import Positive, Share
from jaxrlhf.dataflows import grpo
from jaxrlhf.dataflows.batches.scored import ScoredRollout
from jaxrlhf.dataflows.step import Roles, StepInput, StepResult

token_covariance = load_module("clip_cov").token_covariance


def largest(advantage_BT: Array, logp_BT: Array, mask_BT: Array, *, share: float) -> Bool[np.ndarray, "B T"]:
    """Select the tokens that are penalized: the tokens with the largest covariance, at least one."""
    cov_BT = token_covariance(advantage_BT, logp_BT, mask_BT)
    first = np.argsort(-cov_BT, axis=None, kind="stable")[: max(1, int(share * np.count_nonzero(mask_BT)))]
    chosen = np.zeros(cov_BT.size, bool)
    chosen[first] = True
    return chosen.reshape(cov_BT.shape) & np.asarray(mask_BT, bool)


def unclipped_loss(tokens: algos.PolicyTokens, settings: "Unclipped") -> algos.PolicyTerms:
    """Compute the policy loss without a clip, `-A * ratio`."""
    ratio = jnp.exp(tokens.log_ratio)
    return algos.PolicyTerms(-tokens.advantage * ratio, ratio, {})


@dataclass(frozen=True, kw_only=True)
class Unclipped(RatioLoss):
    """Policy loss without a clip."""

    function = unclipped_loss


def objective(
    output: algos.TokenOutput, mask: Array, weight: Array, fields: Mapping[str, Any], settings: "KLCov"
) -> algos.ObjectiveTerms:
    """Compute `policy_objective`, plus a penalty on the distance to the old policy at the selected tokens.

        weight * [token is selected] * coefficient * |log ratio|

    Args:
      fields: In addition `chosen`, 1 at the selected tokens and 0 elsewhere.
    """
    policy = algos.policy_objective(output, mask, weight, fields, settings)
    chosen = mask & (algos.selected(fields["chosen"], mask) > 0)
    loss, metrics = policy.loss, policy.metrics | {"policy/chosen": chosen.astype(policy.loss.dtype)}
    if "old_logp" in fields:  # otherwise the old policy is the current one, and the distance is 0
        logp, old_logp = (algos.selected(value, chosen) for value in (output.logp, fields["old_logp"]))
        log_ratio = algos.PolicyTokens(logp, old_logp, jnp.zeros_like(logp)).log_ratio
        loss += algos.selected(weight, mask) * settings.coefficient * jnp.abs(log_ratio)
    return algos.ObjectiveTerms(loss, metrics)


def learn(roles: Roles, work: StepInput["KLCov"], batch: ScoredRollout) -> StepResult:
    """Learn by KL-Cov: GRPO's advantages, with a penalty on the selected tokens."""
    settings = work.settings

    def advantage(returns: grpo.Returns) -> Array:
        return algos.group_relative(*returns.groups, normalize_std=settings.normalize_std)

    def loss_fields(returns: grpo.Returns, advantage_BT: Array) -> dict[str, Array]:
        assert returns.logp_BT is not None
        chosen_BT = largest(advantage_BT, returns.logp_BT, returns.mask_BT, share=settings.share)
        return {"chosen": chosen_BT.astype(np.float32)}

    return grpo.learn(roles, work, batch, advantage, objective=objective, loss_fields=loss_fields)


@dataclass(frozen=True)
class KLCov(GRPO):
    """GRPO without a clip, and with a penalty on a few tokens that would lower the entropy the most.

    Attributes:
      share: Share of a step's tokens that are penalized: the tokens with the largest covariance of advantage and
        log-probability.
      coefficient: Weight of the penalty, the distance of these tokens to the old policy.
      policy: Policy loss of all tokens.
    """

    learn = learn

    share: Share[Positive[float]] = 2e-4
    coefficient: Positive[float] = 1.0
    policy: RatioLoss = field(default_factory=Unclipped)


def get_config() -> Config:
    """Return the configuration of the run."""
    return replace(load("grpo_arithmetic"), name="kl_cov", algorithm=KLCov(responses_per_update=64, share=0.02))
