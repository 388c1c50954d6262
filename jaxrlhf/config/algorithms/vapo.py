"""Settings of VAPO: PPO for long chains of thought."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from jaxrlhf.config.algorithms.ppo import PPO
from jaxrlhf.config.losses import PolicyLoss
from jaxrlhf.config.settings import Finite, NotNegative, Positive


@dataclass(frozen=True)
class VAPO(PPO):
    """Value-augmented PPO (Yue et al. 2025, arXiv:2504.05118).

    The critic learns from Monte Carlo returns (`lam` is its lambda), in the first `critic_warmup_steps` without the
    policy. The policy's lambda depends on the response length; its loss clips higher and imitates successful responses.

    Attributes:
      length_scale: alpha in the policy's lambda = 1 - 1 / (alpha * length), with the length counted in `actions`.
      imitation: Weight of the mean -logp of the tokens of responses with a score above `success`.
      success: Score above which a response is imitated.
    """

    learn: ClassVar[str] = "jaxrlhf.dataflows.vapo:learn"

    policy: PolicyLoss = field(default_factory=lambda: PolicyLoss(clip_high=0.28))
    critic_warmup_steps: NotNegative[int] = 50
    length_scale: Positive[float] = 0.05
    imitation: NotNegative[float] = 0.1
    success: Finite[float] = 0.0
