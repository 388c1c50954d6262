"""Algorithms as pure array maths: no model, no device, no I/O.

Controllers turn scores into advantages and per-token weights here; trainers call the
objectives. Functions take numpy or JAX arrays, also inside `jit`.
"""

from jaxrlhf.algos.advantages import Targets, discounted_returns, gae, group_relative, rloo, to_tokens
from jaxrlhf.algos.correction import SamplerGap, sampler_gap, truncated_importance
from jaxrlhf.algos.kl import adaptive_kl_coefficient, kl_estimate
from jaxrlhf.algos.losses import clipped_policy_loss, clipped_value_loss
from jaxrlhf.algos.masked import masked_mean, masked_sum, masked_var, selected, whiten
from jaxrlhf.algos.objectives import Objective, TokenOutput, nll_objective, policy_objective, value_objective
from jaxrlhf.algos.shaping import overlong_penalty, token_rewards
from jaxrlhf.algos.weights import token_weights

__all__ = [
    "Objective",
    "SamplerGap",
    "Targets",
    "TokenOutput",
    "adaptive_kl_coefficient",
    "clipped_policy_loss",
    "clipped_value_loss",
    "discounted_returns",
    "gae",
    "group_relative",
    "kl_estimate",
    "masked_mean",
    "masked_sum",
    "masked_var",
    "nll_objective",
    "overlong_penalty",
    "policy_objective",
    "rloo",
    "sampler_gap",
    "selected",
    "to_tokens",
    "token_rewards",
    "token_weights",
    "truncated_importance",
    "value_objective",
    "whiten",
]
