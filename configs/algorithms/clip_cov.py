"""Clip-Cov: GRPO that keeps up the entropy, because a few tokens of high covariance are not trained on.

    python -m jaxrlhf.train --config clip_cov.py

The entropy of a policy falls with the covariance of its log-probabilities and advantages, and a few tokens with a large
covariance lower it most. Tokens are selected once per step, among all tokens of the step, so packing and microbatches
do not change the selection. All other settings are those of `grpo_arithmetic.py`.

Source: Cui et al. 2025 (The entropy mechanism of reinforcement learning for reasoning language models,
arXiv:2505.22617), section 4.2.
"""

from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Bool, Float

from jaxrlhf import algos
from jaxrlhf.batch import Array
from jaxrlhf.config import GRPO, Config, load
from jaxrlhf.config.refusal import require
from jaxrlhf.config.settings import Finite, Positive, Share
from jaxrlhf.dataflows import grpo
from jaxrlhf.dataflows.batches.scored import ScoredRollout
from jaxrlhf.dataflows.step import Roles, StepInput, StepResult


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


def sampled_in_range(
    advantage_BT: Array, logp_BT: Array, mask_BT: Array, rng: np.random.Generator, settings: "ClipCov"
) -> Bool[np.ndarray, "B T"]:
    """Select the tokens that are left out: a random sample of the tokens with a covariance in the range.

    At least one token is selected, if the range has any.
    """
    cov_BT = token_covariance(advantage_BT, logp_BT, mask_BT)
    inside = np.flatnonzero((settings.covariance_low < cov_BT) & (cov_BT < settings.covariance_high))
    chosen = np.zeros(cov_BT.size, bool)
    chosen[rng.permutation(inside)[: max(1, int(settings.share * np.count_nonzero(mask_BT)))]] = True
    return chosen.reshape(cov_BT.shape)


def learn(roles: Roles, work: StepInput["ClipCov"], batch: ScoredRollout) -> StepResult:
    """Learn by Clip-Cov: GRPO's advantages, and 0 at the selected tokens, whose policy loss is then 0.

    `policy/chosen` is the share of the selected tokens.
    """
    settings, metrics = work.settings, {}

    def advantage(returns: grpo.Returns) -> Array:
        assert returns.logp_BT is not None
        own_B = algos.group_relative(*returns.groups, normalize_std=settings.normalize_std)
        own_BT = np.asarray(algos.to_tokens(own_B, returns.mask_BT))
        rng = np.random.default_rng([work.seed, 1])
        chosen_BT = sampled_in_range(own_BT, returns.logp_BT, returns.mask_BT, rng, settings)
        metrics["policy/chosen"] = float(chosen_BT.sum() / max(np.count_nonzero(returns.mask_BT), 1))
        return np.where(chosen_BT, 0, own_BT)

    result = grpo.learn(roles, work, batch, advantage)
    return replace(result, metrics=result.metrics | metrics)


@dataclass(frozen=True)
class ClipCov(GRPO):
    """GRPO that leaves out a few tokens that would lower the entropy the most.

    Attributes:
      share: Share of a step's tokens that are left out, sampled from the tokens whose covariance of advantage and
        log-probability is in the range.
      covariance_low, covariance_high: Limits of the covariance range.
    """

    learn = learn

    share: Share[Positive[float]] = 2e-4
    covariance_low: Finite[float] = 1.0
    covariance_high: float = 5.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.covariance_low < self.covariance_high,
            f"ClipCov.covariance_low={self.covariance_low} must be below covariance_high={self.covariance_high}",
        )


def get_config() -> Config:
    """Return the configuration of the run."""
    algorithm = ClipCov(responses_per_update=64, share=0.02, covariance_low=0.0)
    return replace(load("grpo_arithmetic"), name="clip_cov", algorithm=algorithm)
